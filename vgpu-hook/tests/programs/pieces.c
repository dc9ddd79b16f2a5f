// Threads take and give pieces of blocks that are paid for, while another one asks again and again for all that is left, as memory of a
// kind: tells how often that was refused. `pieces KIND ROUNDS after`: beside one thread, once a call is over that
// stayed at the driver.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long ptr;
typedef int res;
struct array3d { size_t width, height, depth; unsigned format, channels, flags; };
struct location { unsigned kind; int id; };
struct pool { unsigned kind, handles; struct location location; void *win32; size_t most; unsigned char reserved[56]; };
struct node { struct pool pool; const void *access; size_t count, bytes; ptr address; };
res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuCtxSetCurrent(void *);
res cuMemAlloc_v2(ptr *, size_t);
res cuMemAllocManaged(ptr *, size_t, unsigned);
res cuMemFree_v2(ptr);
res cuMemGetInfo_v2(size_t *, size_t *);
res cuMemAllocAsync(ptr *, size_t, void *);
res cuMemFreeAsync(ptr, void *);
res cuStreamSynchronize(void *);
res cuCtxCreate_v2(void **, unsigned, int);
res cuCtxDestroy_v2(void *);
res cuArray3DCreate_v2(void **, const struct array3d *);
res cuArrayDestroy(void *);
res cuGraphCreate(void **, unsigned);
res cuGraphAddMemAllocNode(void **, void *, const void **, size_t, struct node *);
res cuGraphAddMemFreeNode(void **, void *, const void **, size_t, ptr);
res cuGraphInstantiateWithFlags(void **, void *, ptr);
res cuGraphLaunch(void *, void *);
res cuDeviceGraphMemTrim(int);
ptr fake_cuda_calls(const char *);

enum { THREADS = 8, PIECE = 512 };
static void *context;
static atomic_int is_over, is_there;

static void must(res result) {
  if (!result) return;
  fprintf(stderr, "a call answers %d\n", result);
  exit(4);
}

static void *churn(void *unused) {
  ptr piece;
  must(cuCtxSetCurrent(context));
  while (!is_over) {
    must(cuMemAlloc_v2(&piece, PIECE));
    must(cuMemFree_v2(piece));
  }
  return unused;
}

static void *stay(void *unused) {
  ptr address;
  must(cuCtxSetCurrent(context));
  must(cuMemAllocManaged(&address, 2 << 20, 1));
  must(cuMemFree_v2(address));
  is_there = 0;
  return unused;
}

// A graph that takes so many bytes while it runs.
static void *graph_of(size_t bytes) {
  void *graph, *take, *give, *exec;
  struct node p = { .pool = { .kind = 1, .location = { 1, 0 } }, .bytes = bytes };
  must(cuGraphCreate(&graph, 0));
  must(cuGraphAddMemAllocNode(&take, graph, 0, 0, &p));
  const void *after[1] = { take };
  must(cuGraphAddMemFreeNode(&give, graph, after, 1, p.address));
  must(cuGraphInstantiateWithFlags(&exec, graph, 0));
  return exec;
}

// Takes all that is left and gives it back.
static res once(const char *kind, size_t left, void *graph) {
  static const struct array3d small = { 16, 16, 0, 1, 1, 0 };
  ptr address;
  void *other;
  res result;
  if (!strcmp(kind, "async")) {
    if ((result = cuMemAllocAsync(&address, left, 0))) return result;
    must(cuMemFreeAsync(address, 0));
    return cuStreamSynchronize(0);
  }
  if (!strcmp(kind, "graph")) {
    if ((result = cuGraphLaunch(graph, 0))) return result;
    must(cuStreamSynchronize(0));
    return cuDeviceGraphMemTrim(0);
  }
  if (!strcmp(kind, "array")) return (result = cuArray3DCreate_v2(&other, &small)) ? result : cuArrayDestroy(other);
  if (!strcmp(kind, "context")) {
    if ((result = cuCtxCreate_v2(&other, 0, 0))) return result;
    must(cuCtxDestroy_v2(other));
    return cuCtxSetCurrent(context);
  }
  return (result = cuMemAlloc_v2(&address, left)) ? result : cuMemFree_v2(address);
}

int main(int argc, char **argv) {
  pthread_t threads[THREADS], other;
  ptr address;
  size_t left, total;
  int refused = 0, count = argc > 3 ? 1 : THREADS;
  void *graph;
  if (argc < 3) return 2;
  must(cuInit(0));
  must(cuDevicePrimaryCtxRetain(&context, 0));
  must(cuCtxSetCurrent(context));
  // The block stays.
  must(cuMemAlloc_v2(&address, PIECE));
  must(cuMemGetInfo_v2(&left, &total));
  graph = graph_of(left);
  for (int i = 0; i < count; i++) pthread_create(&threads[i], 0, churn, 0);
  if (argc > 3) {
    is_there = 1;
    pthread_create(&other, 0, stay, 0);
    while (!fake_cuda_calls("cuMemAllocManaged")) usleep(1000);
  }
  for (int round = atoi(argv[2]); round > 0;) {
    int counts = !is_there;
    res result = once(argv[1], left, graph);
    if (result != 2) must(result);
    else refused += counts;
    round -= counts;
  }
  is_over = 1;
  for (int i = 0; i < count; i++) pthread_join(threads[i], 0);
  printf("refused %d\n", refused);
  return 0;
}
