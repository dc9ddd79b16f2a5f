// Calls driver functions as told on standard input, a line each, and answers each with a line: the driver's result, then
// what it gave. Names stand for what was allocated.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long ptr;
typedef int res;
struct array3d { size_t width, height, depth; unsigned format, channels, flags; };
struct location { unsigned kind; int id; };
struct allocation { unsigned kind, handles; struct location location; void *win32; unsigned char flags[8]; };
struct pool { unsigned kind, handles; struct location location; void *win32; size_t most; unsigned char reserved[56]; };
struct node { struct pool pool; const void *access; size_t count, bytes; ptr address; };

res cuInit(unsigned);
res cuDeviceGetCount(int *);
res cuDeviceTotalMem_v2(size_t *, int);
res cuDevicePrimaryCtxRetain(void **, int);
res cuDevicePrimaryCtxRelease_v2(int);
res cuDevicePrimaryCtxReset_v2(int);
res cuCtxSetCurrent(void *);
res cuCtxGetCurrent(void **);
res cuCtxCreate_v2(void **, unsigned, int);
res cuCtxDestroy_v2(void *);
res cuCtxAttach(void **, unsigned);
res cuCtxDetach(void *);
res cuDeviceGetDevResource(int, void *, unsigned);
res cuDevResourceGenerateDesc(void **, void *, unsigned);
res cuGreenCtxCreate(void **, void *, int, unsigned);
res cuGreenCtxDestroy(void *);
res cuCtxSetLimit(unsigned, size_t);
res cuCtxSynchronize(void);
res cuStreamSynchronize(void *);
res cuMemAlloc_v2(ptr *, size_t);
res cuMemAlloc(unsigned *, unsigned);
res cuMemFree_v2(ptr);
res cuMemAllocPitch_v2(ptr *, size_t *, size_t, size_t, unsigned);
res cuMemAllocManaged(ptr *, size_t, unsigned);
res cuMemAllocHost_v2(void **, size_t);
res cuMemGetInfo_v2(size_t *, size_t *);
res cuArray3DCreate_v2(void **, const struct array3d *);
res cuArrayDestroy(void *);
res cuMipmappedArrayCreate(void **, const struct array3d *, unsigned);
res cuMipmappedArrayDestroy(void *);
res cuMemAllocAsync(ptr *, size_t, void *);
res cuMemAllocAsync_ptsz(ptr *, size_t, void *);
res cuStreamCreate(void **, unsigned);
res cuStreamBeginCapture_v2(void *, unsigned);
res cuStreamEndCapture(void *, void **);
res cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
res cuModuleGetFunction(void **, void *, const char *);
res cuMemFreeAsync(ptr, void *);
res cuMemAllocFromPoolAsync(ptr *, size_t, void *, void *);
res cuMemPoolCreate(void **, const struct pool *);
res cuMemPoolDestroy(void *);
res cuMemPoolTrimTo(void *, size_t);
res cuMemPoolSetAttribute(void *, unsigned, void *);
res cuDeviceGetMemPool(void **, int);
res cuDeviceGetDefaultMemPool(void **, int);
res cuMemCreate(ptr *, size_t, const struct allocation *, ptr);
res cuMemRelease(ptr);
res cuMemRetainAllocationHandle(ptr *, void *);
res cuMemAddressReserve(ptr *, size_t, size_t, ptr, ptr);
res cuMemMap(ptr, size_t, size_t, ptr, ptr);
res cuMemUnmap(ptr, size_t);
res cuModuleLoadData(void **, const void *);
res cuModuleUnload(void *);
res cuLibraryLoadData(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
res cuLibraryUnload(void *);
res cuGraphCreate(void **, unsigned);
res cuGraphAddMemAllocNode(void **, void *, const void **, size_t, struct node *);
res cuGraphAddMemFreeNode(void **, void *, const void **, size_t, ptr);
res cuGraphAddChildGraphNode(void **, void *, const void **, size_t, void *);
res cuGraphInstantiateWithFlags(void **, void *, ptr);
struct instantiation { ptr flags; void *stream, *node; unsigned result; };
res cuGraphInstantiateWithParams(void **, void *, struct instantiation *);
res cuGraphUpload(void *, void *);
res cuGraphDestroy(void *);
res cuGraphLaunch(void *, void *);
res cuGraphExecDestroy(void *);
res cuDeviceGraphMemTrim(int);
struct ipc { unsigned char bytes[64]; };
res cuIpcGetMemHandle(struct ipc *, ptr);
res cuIpcOpenMemHandle_v2(ptr *, struct ipc, unsigned);
res cuIpcCloseMemHandle(ptr);
res cuMemExportToShareableHandle(void *, ptr, unsigned, ptr);
res cuMemImportFromShareableHandle(ptr *, void *, unsigned);
ptr fake_cuda_given(int);
ptr fake_cuda_given_on_card(int);
ptr fake_cuda_peak(int);
int fake_cuda_fail(const char *, unsigned, unsigned);
unsigned mullion_fault_points_passed(void) __attribute__((weak));

enum { NAMES = 4096, UNTOUCHED = 0x5a5a };
static struct { char name[24]; ptr value, size; } names[NAMES];
static int used;

static int find(const char *name) {
  for (int i = 0; i < used; i++)
    if (!strcmp(names[i].name, name)) return i;
  if (used == NAMES) exit(9);
  snprintf(names[used].name, sizeof names[used].name, "%s", name);
  names[used].value = names[used].size = 0;
  return used++;
}
static ptr get(const char *name) { return name[0] == '0' ? strtoull(name, 0, 0) : names[find(name)].value; }
static void *handle(const char *name) { return (void *)(uintptr_t)get(name); }

// A result, with 1 when a failed call has written its result nevertheless.
static void answer(const char *name, res result, ptr value) {
  if (!result) names[find(name)].value = value;
  printf("%d %d\n", result, result && value != UNTOUCHED);
}

static void *freeing(void *name) { return (void *)(uintptr_t)cuMemFree_v2(get(name)); }
static void *starting(void *unused) { return (void *)(uintptr_t)cuInit(0); }

// Takes and gives memory of all sizes, in an order of its own; until it is told to stop where `churning` is not 0.
static atomic_int hammered, churning;
static void *hammering(void *context) {
  unsigned long long seed = 88172645463325252ull ^ (uintptr_t)&seed;
  ptr held[16] = { 0 };
  int async[16] = { 0 };
  if (cuCtxSetCurrent(context)) return 0;
  for (int i = 0; churning ? churning > 0 : i < 4000; i++) {
    seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17;
    int at = seed % 16;
    if (held[at]) {
      if (async[at] ? cuMemFreeAsync(held[at], 0) : cuMemFree_v2(held[at])) hammered++;
      held[at] = 0;
    } else {
      size_t size = seed >> 8 & 1 ? 1 + (seed >> 16) % 100000 : 1 + (seed >> 16) % 5000000;
      async[at] = (seed >> 9) % 8 == 0;
      res r = async[at] ? cuMemAllocAsync(&held[at], size, 0) : cuMemAlloc_v2(&held[at], size);
      if (r) held[at] = 0;
      if (r && r != 2) hammered++;
    }
  }
  for (int at = 0; at < 16; at++)
    if (held[at] && (async[at] ? cuMemFreeAsync(held[at], 0) : cuMemFree_v2(held[at]))) hammered++;
  return 0;
}

static pthread_t churner[8];
static int churners;

static void steps(FILE *in);
static void *going_on(void *in) { printf("0\n"); fflush(stdout); steps(in); exit(0); }

static void step(char *line, FILE *in) {
  char what[32] = "", a[64] = "", b[64] = "", c[64] = "", d[64] = "";
  sscanf(line, "%31s %63s %63s %63s %63s", what, a, b, c, d);
  ptr place = UNTOUCHED;
  void *thing = (void *)(uintptr_t)UNTOUCHED;
  size_t n = strtoull(b, 0, 0), m = strtoull(c, 0, 0);
#define IS(word) (!strcmp(what, word))
  if (IS("init")) printf("%d\n", cuInit(0));
  else if (IS("count")) { int count = -1; res r = cuDeviceGetCount(&count); printf("%d %d\n", r, count); }
  else if (IS("threads")) {
    pthread_t t[16]; int failed = 0;
    for (int i = 0; i < 16; i++) pthread_create(&t[i], 0, starting, 0);
    for (int i = 0; i < 16; i++) { void *r; pthread_join(t[i], &r); failed += r != 0; }
    printf("%d\n", failed);
  }
  else if (IS("total")) { size_t bytes = 0; res r = cuDeviceTotalMem_v2(&bytes, atoi(a)); printf("%d %zu\n", r, bytes); }
  else if (IS("primary")) {
    void *context; res r = cuDevicePrimaryCtxRetain(&context, atoi(a));
    if (!r) r = cuCtxSetCurrent(context);
    printf("%d\n", r);
  }
  else if (IS("retain-primary")) { void *context; printf("%d\n", cuDevicePrimaryCtxRetain(&context, atoi(a))); }
  else if (IS("release-primary")) printf("%d\n", cuDevicePrimaryCtxRelease_v2(atoi(a)));
  else if (IS("reset-primary")) printf("%d\n", cuDevicePrimaryCtxReset_v2(atoi(a)));
  else if (IS("context")) { res r = cuCtxCreate_v2(&thing, 0, atoi(b)); answer(a, r, (uintptr_t)thing); }
  else if (IS("destroy-context")) printf("%d\n", cuCtxDestroy_v2(handle(a)));
  else if (IS("attach")) printf("%d\n", cuCtxAttach(&thing, 0));
  else if (IS("detach")) printf("%d\n", cuCtxDetach(handle(a)));
  else if (IS("green")) {
    // Of all its SMs.
    unsigned long long sms[64]; void *description;
    res r = cuDeviceGetDevResource(n, sms, 1);
    if (!r) r = cuDevResourceGenerateDesc(&description, sms, 1);
    if (!r) r = cuGreenCtxCreate(&thing, description, n, 1);
    answer(a, r, (uintptr_t)thing);
  }
  else if (IS("destroy-green")) printf("%d\n", cuGreenCtxDestroy(handle(a)));
  else if (IS("current")) printf("%d\n", cuCtxSetCurrent(a[0] ? handle(a) : 0));
  else if (IS("heap")) printf("%d\n", cuCtxSetLimit(2, strtoull(a, 0, 0)));
  else if (IS("stack")) printf("%d\n", cuCtxSetLimit(0, strtoull(a, 0, 0)));
  else if (IS("alloc")) { res r = cuMemAlloc_v2(&place, n); answer(a, r, place); }
  else if (IS("alloc-v1")) { unsigned old = UNTOUCHED; res r = cuMemAlloc(&old, n); printf("%d %d\n", r, old != UNTOUCHED); }
  else if (IS("alloc-nowhere")) printf("%d\n", cuMemAlloc_v2(0, 512));
  else if (IS("free")) printf("%d\n", cuMemFree_v2(get(a)));
  else if (IS("free-elsewhere")) { pthread_t t; void *r; pthread_create(&t, 0, freeing, a); pthread_join(t, &r); printf("%d\n", (int)(uintptr_t)r); }
  else if (IS("pitch")) {
    size_t pitch = UNTOUCHED; res r = cuMemAllocPitch_v2(&place, &pitch, n, m, d[0] ? atoi(d) : 4);
    if (r && pitch != UNTOUCHED) place = 0;
    answer(a, r, place);
  }
  else if (IS("managed")) { res r = cuMemAllocManaged(&place, n, 1); answer(a, r, place); }
  else if (IS("host")) { res r = cuMemAllocHost_v2(&thing, n); answer(a, r, (uintptr_t)thing); }
  else if (IS("array") || IS("mipmap") || IS("sparse")) {
    struct array3d shape = { n, m, 0, 0x20, 1, IS("sparse") ? 0x40 : 0 };
    res r = IS("mipmap") ? cuMipmappedArrayCreate(&thing, &shape, 12) : cuArray3DCreate_v2(&thing, &shape);
    answer(a, r, (uintptr_t)thing);
  }
  else if (IS("array-of")) {
    // Of that format.
    struct array3d shape = { n, m, 0, strtoul(d, 0, 0), 1, 0 };
    res r = cuArray3DCreate_v2(&thing, &shape); answer(a, r, (uintptr_t)thing);
  }
  else if (IS("destroy-array")) printf("%d\n", cuArrayDestroy(handle(a)));
  else if (IS("destroy-mipmap")) printf("%d\n", cuMipmappedArrayDestroy(handle(a)));
  else if (IS("async")) { res r = cuMemAllocAsync(&place, n, 0); answer(a, r, place); }
  else if (IS("async-ptsz")) { res r = cuMemAllocAsync_ptsz(&place, n, 0); answer(a, r, place); }
  else if (IS("free-async")) printf("%d\n", cuMemFreeAsync(get(a), 0));
  else if (IS("stream")) { res r = cuStreamCreate(&thing, 1); answer(a, r, (uintptr_t)thing); }
  else if (IS("async-in")) { res r = cuMemAllocAsync(&place, m, handle(b)); answer(a, r, place); }
  else if (IS("free-in")) printf("%d\n", cuMemFreeAsync(get(a), handle(b)));
  else if (IS("work")) {
    // A kernel of a module, by its name, in a stream.
    void *kernel; res r = cuModuleGetFunction(&kernel, handle(a), b);
    if (!r) r = cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, handle(c), 0, 0);
    printf("%d\n", r);
  }
  else if (IS("capture")) printf("%d\n", cuStreamBeginCapture_v2(handle(a), 2));
  else if (IS("captured")) { res r = cuStreamEndCapture(handle(b), &thing); answer(a, r, (uintptr_t)thing); }
  else if (IS("instantiate")) {
    struct instantiation p = { .flags = m }; res r = cuGraphInstantiateWithParams(&thing, handle(b), &p);
    answer(a, r, (uintptr_t)thing);
  }
  else if (IS("launch-in")) printf("%d\n", cuGraphLaunch(handle(a), handle(b)));
  else if (IS("upload")) printf("%d\n", cuGraphUpload(handle(a), 0));
  else if (IS("destroy-description")) printf("%d\n", cuGraphDestroy(handle(a)));
  else if (IS("sync")) printf("%d\n", cuCtxSynchronize());
  else if (IS("pool")) {
    struct pool p = { .kind = d[0] ? atoi(d) : 1, .location = { n ? n : 1, m } };
    res r = cuMemPoolCreate(&thing, &p); answer(a, r, (uintptr_t)thing);
  }
  else if (IS("default-pool")) { res r = cuDeviceGetMemPool(&thing, 0); answer(a, r, (uintptr_t)thing); }
  else if (IS("pool-of")) { res r = cuDeviceGetDefaultMemPool(&thing, n); answer(a, r, (uintptr_t)thing); }
  else if (IS("from-pool")) { res r = cuMemAllocFromPoolAsync(&place, m, handle(b), 0); answer(a, r, place); }
  else if (IS("from-pool-in")) { res r = cuMemAllocFromPoolAsync(&place, strtoull(d, 0, 0), handle(b), handle(c)); answer(a, r, place); }
  else if (IS("keep")) { ptr threshold = n; printf("%d\n", cuMemPoolSetAttribute(handle(a), 4, &threshold)); }
  else if (IS("trim")) printf("%d\n", cuMemPoolTrimTo(handle(a), n));
  else if (IS("destroy-pool")) printf("%d\n", cuMemPoolDestroy(handle(a)));
  else if (IS("create")) {
    struct allocation p = { .kind = 1, .handles = 1, .location = { strtoul(d, 0, 0) ? strtoul(d, 0, 0) : 1, m } };
    res r = cuMemCreate(&place, n, &p, 0); answer(a, r, place);
  }
  else if (IS("release")) printf("%d\n", cuMemRelease(get(a)));
  else if (IS("reserve")) { res r = cuMemAddressReserve(&place, n, 0, 0, 0); answer(a, r, place); }
  else if (IS("map")) printf("%d\n", cuMemMap(get(a) + m, strtoull(d, 0, 0), 0, get(b), 0));
  else if (IS("unmap")) printf("%d\n", cuMemUnmap(get(a) + m, n));
  else if (IS("retain")) { res r = cuMemRetainAllocationHandle(&place, (void *)(uintptr_t)(get(b) + m)); answer(a, r, place); }
  else if (IS("module")) {
    // An ELF file whose section headers, none, lie at its end.
    ptr image[8] = { 0x464c457f, 0, 0, 0, 0, n };
    res r = cuModuleLoadData(&thing, image); answer(a, r, (uintptr_t)thing);
  }
  else if (IS("library")) {
    ptr image[8] = { 0x464c457f, 0, 0, 0, 0, n };
    res r = cuLibraryLoadData(&thing, image, 0, 0, 0, 0, 0, 0); answer(a, r, (uintptr_t)thing);
  }
  else if (IS("unload-library")) printf("%d\n", cuLibraryUnload(handle(a)));
  else if (IS("unload")) printf("%d\n", cuModuleUnload(handle(a)));
  else if (IS("graph")) {
    void *graph, *take, *give, *exec = 0;
    struct node p = { .pool = { .kind = 1, .location = { 1, m } }, .bytes = n };
    res r = cuGraphCreate(&graph, 0);
    if (!r) r = cuGraphAddMemAllocNode(&take, graph, 0, 0, &p);
    const void *after[1] = { take };
    if (!r) r = cuGraphAddMemFreeNode(&give, graph, after, 1, p.address);
    if (!r) r = cuGraphInstantiateWithFlags(&exec, graph, 0);
    answer(a, r, (uintptr_t)exec);
  }
  else if (IS("graph-on-two")) {
    // Memory of card 0 and of card 1.
    void *graph, *first, *second, *exec = 0;
    struct node p = { .pool = { .kind = 1, .location = { 1, 0 } }, .bytes = n };
    struct node q = { .pool = { .kind = 1, .location = { 1, 1 } }, .bytes = m };
    res r = cuGraphCreate(&graph, 0);
    if (!r) r = cuGraphAddMemAllocNode(&first, graph, 0, 0, &p);
    const void *after[1] = { first };
    if (!r) r = cuGraphAddMemAllocNode(&second, graph, after, 1, &q);
    if (!r) r = cuGraphInstantiateWithFlags(&exec, graph, 0);
    answer(a, r, (uintptr_t)exec);
  }
  else if (IS("graph-within")) {
    // An allocation so many graphs deep.
    void *graph, *outer, *node, *exec = 0;
    struct node p = { .pool = { .kind = 1, .location = { 1, 0 } }, .bytes = n };
    res r = cuGraphCreate(&graph, 0);
    if (!r) r = cuGraphAddMemAllocNode(&node, graph, 0, 0, &p);
    for (size_t i = 0; i < m && !r; i++, graph = outer) {
      r = cuGraphCreate(&outer, 0);
      if (!r) r = cuGraphAddChildGraphNode(&node, outer, 0, 0, graph);
    }
    if (!r) r = cuGraphInstantiateWithFlags(&exec, graph, 0);
    answer(a, r, (uintptr_t)exec);
  }
  else if (IS("launch")) printf("%d\n", cuGraphLaunch(handle(a), 0));
  else if (IS("destroy-graph")) printf("%d\n", cuGraphExecDestroy(handle(a)));
  else if (IS("sync-stream")) printf("%d\n", cuStreamSynchronize(a[0] ? handle(a) : 0));
  else if (IS("trim-graphs")) printf("%d\n", cuDeviceGraphMemTrim(atoi(a)));
  else if (IS("info")) { size_t free = 1, total = 2; res r = cuMemGetInfo_v2(&free, &total); printf("%d %zu %zu\n", r, free, total); }
  else if (IS("info-free")) { size_t free = 1; res r = cuMemGetInfo_v2(&free, 0); printf("%d %zu\n", r, free); }
  else if (IS("info-total")) { size_t total = 1; res r = cuMemGetInfo_v2(0, &total); printf("%d %zu\n", r, total); }
  else if (IS("info-none")) printf("%d\n", cuMemGetInfo_v2(0, 0));
  else if (IS("given")) printf("0 %llu %llu %llu\n", fake_cuda_given(atoi(a)), fake_cuda_given_on_card(atoi(a)), fake_cuda_peak(atoi(a)));
  else if (IS("fail")) printf("%d\n", fake_cuda_fail(a, n, m));
  else if (IS("hammer")) {
    pthread_t t[8]; void *context = 0; cuCtxGetCurrent(&context); hammered = 0;
    for (int i = 0; i < 8; i++) pthread_create(&t[i], 0, hammering, context);
    for (int i = 0; i < 8; i++) pthread_join(t[i], 0);
    printf("%d\n", hammered);
  }
  else if (IS("churn")) {
    void *context = 0; cuCtxGetCurrent(&context); hammered = 0; churning = 1; churners = atoi(a);
    for (int i = 0; i < churners; i++) pthread_create(&churner[i], 0, hammering, context);
    printf("0\n");
  }
  else if (IS("stop")) {
    churning = -1;
    for (int i = 0; i < churners; i++) pthread_join(churner[i], 0);
    churning = 0;
    printf("%d\n", hammered);
  }
  else if (IS("export")) {
    // As eight numbers, for another process's `open`.
    struct ipc h; res r = cuIpcGetMemHandle(&h, get(a)); unsigned long long w[8];
    memcpy(w, &h, sizeof w); printf("%d", r);
    for (int i = 0; i < 8; i++) printf(" %llu", w[i]);
    printf("\n");
  }
  else if (IS("open")) {
    struct ipc h; unsigned long long w[8];
    sscanf(line, "%*s %*s %llu %llu %llu %llu %llu %llu %llu %llu", w, w + 1, w + 2, w + 3, w + 4, w + 5, w + 6, w + 7);
    memcpy(&h, w, sizeof w); res r = cuIpcOpenMemHandle_v2(&place, h, 1); answer(a, r, place);
  }
  else if (IS("close")) printf("%d\n", cuIpcCloseMemHandle(get(a)));
  else if (IS("import")) {
    int fd = -1; res r = cuMemExportToShareableHandle(&fd, get(b), 1, 0);
    if (!r) r = cuMemImportFromShareableHandle(&place, (void *)(uintptr_t)fd, 1);
    answer(a, r, place);
  }
  else if (IS("where")) printf("0 %llu\n", get(a));
  else if (IS("points")) printf("0 %u\n", mullion_fault_points_passed ? mullion_fault_points_passed() : 0);
  else if (IS("files")) {
    // Descriptors and mappings.
    int files = 0, maps = 0, c; char link[32], to[8];
    for (int fd = 0; fd < 2048; fd++) { snprintf(link, sizeof link, "/proc/self/fd/%d", fd); files += readlink(link, to, sizeof to) > 0; }
    FILE *f = fopen("/proc/self/maps", "r"); while ((c = fgetc(f)) != EOF) maps += c == '\n'; fclose(f);
    printf("0 %d %d\n", files, maps);
  }
  else if (IS("pid")) printf("0 %d\n", getpid());
  else if (IS("chdir")) printf("%d\n", chdir(a));
  // The first thread ends, and another one takes the lines.
  else if (IS("end-first")) { pthread_t t; pthread_create(&t, 0, going_on, in); pthread_exit(0); }
  else if (IS("close-all")) { for (int fd = 3; fd < 2048; fd++) close(fd); printf("0\n"); }
  else if (IS("fork")) {
    // The child takes the lines up to `end`; then the parent goes on.
    fflush(stdout);
    pid_t child = fork();
    if (!child) { steps(in); fflush(stdout); _exit(0); }
    int status; waitpid(child, &status, 0);
    printf("%d\n", status);
  }
  else if (IS("fork-stay")) {
    // A child that does nothing and stays.
    pid_t child = fork();
    if (!child) { fclose(stdin); fclose(stdout); fclose(stderr); for (;;) pause(); }
    printf("0 %d\n", child);
  }
  else if (IS("vfork")) {
    pid_t child = vfork();
    if (!child) _exit(cuMemAlloc_v2(&place, 1 << 20));
    int status; waitpid(child, &status, 0);
    printf("%d\n", WEXITSTATUS(status));
  }
  else if (IS("spawn")) {
    char *argv[] = { "true", 0 }; pid_t child; int status = -1;
    extern char **environ;
    int r = posix_spawnp(&child, "true", 0, 0, argv, environ);
    if (!r) waitpid(child, &status, 0);
    printf("%d\n", r ? r : status);
  }
  else if (IS("exec")) { fflush(stdout); execl(a, a, (char *)0); printf("1\n"); }
  else printf("no such step: %s\n", what);
  fflush(stdout);
}

static char line[512];
static void steps(FILE *in) {
  // Byte by byte: a forked child must not take along what the parent is to read.
  for (size_t at = 0; read(0, &line[at], 1) == 1;) {
    if (line[at] != '\n') { at += at < sizeof line - 1; continue; }
    line[at] = 0; at = 0;
    if (!strcmp(line, "end")) return;
    char copy[512]; strcpy(copy, line);
    step(copy, in);
  }
}

int main(void) {
  steps(stdin);
  return 0;
}
