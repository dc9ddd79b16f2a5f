// What one thread sees while another one is at the driver for long: `stall load`, `stall pool`, `stall sync`, `stall graph`, `stall free`,
// `stall open LIBRARY`, `stall arrays CARD BYTES`, `stall ends END FIRST`, `stall ended`, `stall refused WHAT`,
// `stall gone WHAT BY`, `stall queue`, `stall shares BYTES`, `stall both FIRST`, `stall anew WHAT`, `stall refusals`,
// `stall kept`, `stall credit`, `stall departure`. Compiled with -DLIBRARY it is a library
// whose constructor makes a context.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long ptr;
typedef int res;
struct array3d { size_t width, height, depth; unsigned format, channels, flags; };
res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuDevicePrimaryCtxReset_v2(int);
res cuCtxCreate_v2(void **, unsigned, int);
res cuCtxDestroy_v2(void *);
res cuCtxSetCurrent(void *);
res cuCtxSetLimit(unsigned, size_t);
res cuMemAlloc_v2(ptr *, size_t);
res cuMemFree_v2(ptr);
res cuMemAllocAsync(ptr *, size_t, void *);
res cuMemFreeAsync(ptr, void *);
res cuStreamCreate(void **, unsigned);
res cuStreamSynchronize(void *);
res cuStreamBeginCapture_v2(void *, unsigned);
res cuStreamEndCapture(void *, void **);
res cuGraphInstantiateWithFlags(void **, void *, ptr);
res cuGraphLaunch(void *, void *);
res cuGraphExecDestroy(void *);
res cuDeviceGraphMemTrim(int);
res cuArray3DCreate_v2(void **, const struct array3d *);
res cuArrayDestroy(void *);
res cuModuleUnload(void *);
res cuModuleLoadData(void **, const void *);
res cuModuleLoadDataEx(void **, const void *, unsigned, void *, void *);
res cuModuleGetFunction(void **, void *, const char *);
res cuMemGetInfo_v2(size_t *, size_t *);
ptr fake_cuda_calls(const char *);
ptr fake_cuda_given(int);
int fake_cuda_fail(const char *, unsigned, unsigned);
res cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

#ifdef LIBRARY
__attribute__((constructor)) static void start(void) {
  void *context;
  usleep(300000);
  if (cuDevicePrimaryCtxRetain(&context, 1)) abort();
}
#else
static void *context;
static long longest;

static void must(res result) {
  if (!result) return;
  fprintf(stderr, "a call answers %d\n", result);
  exit(4);
}

static long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

// Waits until so many calls have come to the driver.
static void until(const char *function, ptr calls) {
  while (fake_cuda_calls(function) < calls) usleep(1000);
}

#define TIMED(call) do { long began = now(); must(call); began = now() - began; if (began > longest) longest = began; } while (0)

static void *load(void *unused) {
  ptr image[8] = { 0x464c457f, 0, 0, 0, 0, 2 << 20 };
  void *module;
  must(cuCtxSetCurrent(context));
  must(cuModuleLoadData(&module, image));
  return unused;
}

static void *allocate_in_order(void *unused) {
  ptr address;
  must(cuCtxSetCurrent(context));
  must(cuMemAllocAsync(&address, 4 << 20, 0));
  return unused;
}

// A graph that allocates.
static void *captured(void *stream) {
  void *graph, *exec;
  ptr address;
  TIMED(cuStreamBeginCapture_v2(stream, 2));
  TIMED(cuMemAllocAsync(&address, 4 << 20, stream));
  TIMED(cuMemFreeAsync(address, stream));
  TIMED(cuStreamEndCapture(stream, &graph));
  TIMED(cuGraphInstantiateWithFlags(&exec, graph, 0));
  return exec;
}

static void *launch(void *exec) {
  must(cuCtxSetCurrent(context));
  must(cuGraphLaunch(exec, 0));
  return exec;
}

static void *open_library(void *name) {
  if (!dlopen(name, RTLD_NOW)) { fprintf(stderr, "%s\n", dlerror()); exit(5); }
  return name;
}

static void *tell_when_freeing(void *unused) {
  until("cuMemFree_v2", 1);
  puts("0");
  fflush(stdout);
  return unused;
}

static void arrays_and_limits(void) {
  struct array3d shape = { 16, 16, 0, 1, 1, 0 };
  void *array;
  for (int i = 0; i < 20; i++) {
    TIMED(cuArray3DCreate_v2(&array, &shape));
    TIMED(cuArrayDestroy(array));
  }
  TIMED(cuCtxSetLimit(2, 16 << 20));
}

static void allocations(void) {
  ptr address;
  for (int i = 0; i < 20; i++) {
    TIMED(cuMemAlloc_v2(&address, 4 << 20));
    TIMED(cuMemFree_v2(address));
  }
}

static void *kernel(const char *name) {
  ptr image[8] = { 0x464c457f };
  void *module, *function;
  must(cuModuleLoadData(&module, image));
  must(cuModuleGetFunction(&function, module, name));
  return function;
}

static size_t charged(void) {
  size_t free = 0, total = 0;
  must(cuMemGetInfo_v2(&free, &total));
  return total - free;
}

// Frees what a kernel uses: that waits for the kernel's end.
static ptr used;
static void *freeing(void *unused) {
  must(cuCtxSetCurrent(context));
  must(cuMemFree_v2(used));
  return unused;
}

enum { ARRAYS = 30 };
static const struct array3d small = { 16, 16, 0, 1, 1, 0 };

// Makes and ends arrays on a card while memory of card 0 is being freed.
static void arrays_beside_a_free(int card, size_t bytes) {
  static void *array[ARRAYS];
  void *there = context, *busy = kernel("busy_9s");
  pthread_t first;
  must(cuMemAlloc_v2(&used, bytes));
  must(cuLaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
  pthread_create(&first, 0, freeing, 0);
  until("cuMemFree_v2", 1);
  if (card) must(cuDevicePrimaryCtxRetain(&there, card));
  must(cuCtxSetCurrent(there));
  for (int i = 0; i < ARRAYS; i++) TIMED(cuArray3DCreate_v2(&array[i], &small));
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(card));
  for (int i = 0; i < ARRAYS; i++) TIMED(cuArrayDestroy(array[i]));
  printf("left %zu\ngiven-in-the-end %llu\n", charged(), fake_cuda_given(card));
}

// One more block is freed, late, while an array is made or ended: what is seen then is not what the array took or gave.
static void array_when_a_free_ends(int is_end, int is_first) {
  static const struct array3d line = { 700 << 10, 0, 0, 1, 1, 0 }, longer = { 900 << 10, 0, 0, 1, 1, 0 };
  void *array[8];
  pthread_t first;
  must(cuMemAlloc_v2(&used, 2 << 20));
  // Two in a block, and then one in each of the first two, with too little room beside it for the longer one.
  for (int i = 0; i < 6; i++) must(cuArray3DCreate_v2(&array[i], &line));
  must(cuArrayDestroy(array[0]));
  must(cuArrayDestroy(array[2]));
  must(cuLaunchKernel(kernel("busy_700ms"), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
  pthread_create(&first, 0, freeing, 0);
  until("cuMemFree_v2", 1);
  if (!is_first) must(cuArray3DCreate_v2(&array[6], &small));
  if (is_end) must(cuArrayDestroy(array[4]));
  else must(cuArray3DCreate_v2(&array[7], &longer));
  pthread_join(first, 0);
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
}

// One of two arrays in blocks of their own goes beside a free that waits, and one comes that opens a block as the free gives one back.
static void array_for_another(void) {
  static const struct array3d half = { 512 << 10, 0, 0, 1, 1, 0 }, whole = { 1 << 20, 0, 0, 1, 1, 0 };
  void *array[6], *one;
  pthread_t first;
  must(cuMemAlloc_v2(&used, 2 << 20));
  for (int i = 0; i < 6; i++) must(cuArray3DCreate_v2(&array[i], i == 1 || i == 4 ? &whole : &half));
  for (int i = 0; i < 6; i++)
    if (i != 1 && i != 4) must(cuArrayDestroy(array[i]));
  pthread_create(&first, 0, freeing, 0);
  until("cuMemFree_v2", 1);
  must(cuArrayDestroy(array[4]));
  must(cuArray3DCreate_v2(&one, &whole));
  pthread_join(first, 0);
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
}

static void *ending(void *array) {
  must(cuCtxSetCurrent(context));
  must(cuArrayDestroy(array));
  return array;
}

// An array is ended, which waits; others are made meanwhile.
static void arrays_beside_an_end(void) {
  static void *array[ARRAYS];
  pthread_t first;
  void *one;
  must(cuArray3DCreate_v2(&one, &small));
  ptr calls = fake_cuda_calls("cuArrayDestroy");
  pthread_create(&first, 0, ending, one);
  until("cuArrayDestroy", calls + 1);
  for (int i = 0; i < ARRAYS; i++) TIMED(cuArray3DCreate_v2(&array[i], &small));
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
}

// Arrays are made while an allocation in a stream's order waits for room in its queue.
static void arrays_beside_a_queue(void) {
  static void *array[ARRAYS];
  pthread_t first;
  ptr address;
  must(cuMemAllocAsync(&address, 1 << 20, 0));
  pthread_create(&first, 0, allocate_in_order, 0);
  until("cuMemAllocAsync", 2);
  for (int i = 0; i < ARRAYS; i++) TIMED(cuArray3DCreate_v2(&array[i], &small));
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
  pthread_join(first, 0);
  printf("left %zu\ngiven-in-the-end %llu\n", charged(), fake_cuda_given(0));
}

static atomic_int is_over;
static void *take_pieces(void *unused) {
  ptr piece;
  must(cuCtxSetCurrent(context));
  while (!is_over) {
    must(cuMemAlloc_v2(&piece, 512));
    must(cuMemFree_v2(piece));
  }
  return unused;
}

// More than is left is asked for again and again while an allocation in a stream's order waits for room in its queue, and another thread
// takes pieces.
static void refusals_beside_a_queue(void) {
  pthread_t first, second;
  ptr address;
  size_t left, total;
  must(cuMemAllocAsync(&address, 1 << 20, 0));
  must(cuMemAlloc_v2(&address, 512));
  pthread_create(&first, 0, allocate_in_order, 0);
  until("cuMemAllocAsync", 2);
  must(cuMemGetInfo_v2(&left, &total));
  pthread_create(&second, 0, take_pieces, 0);
  long began = now();
  for (int i = 0; i < 20; i++)
    if (cuMemAlloc_v2(&address, left + (4 << 20)) != 2) abort();
  printf("all %ld\n", now() - began);
  is_over = 1;
  pthread_join(second, 0);
}

static int is_module;
static void *ending_late(void *thing) {
  must(cuCtxSetCurrent(context));
  if (!(is_module ? cuModuleUnload(thing) : cuArrayDestroy(thing))) abort();
  return thing;
}

// Something is ended, which waits until another thread has ended it, or its context.
static void thing_that_is_gone(const char *what, int by_context) {
  struct array3d large = { 4 << 20, 0, 0, 1, 1, 0 };
  ptr image[8] = { 0x464c457f, 0, 0, 0, 0, 4 << 20 };
  void *other, *thing;
  pthread_t first;
  is_module = !strcmp(what, "module");
  const char *end = is_module ? "cuModuleUnload" : "cuArrayDestroy";
  must(cuCtxCreate_v2(&other, 0, 0));
  if (is_module) must(cuModuleLoadData(&thing, image));
  else must(cuArray3DCreate_v2(&thing, strcmp(what, "large") ? &small : &large));
  ptr calls = fake_cuda_calls(end);
  pthread_create(&first, 0, ending_late, thing);
  until(end, calls + 1);
  if (by_context) must(cuCtxDestroy_v2(other));
  else must(is_module ? cuModuleUnload(thing) : cuArrayDestroy(thing));
  pthread_join(first, 0);
  must(cuCtxSetCurrent(context));
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
}

static void *image(size_t bytes) {
  ptr image[8] = { 0x464c457f, 0, 0, 0, 0, bytes };
  void *module;
  must(cuModuleLoadData(&module, image));
  return module;
}

static void *unload_late(void *module) {
  cuModuleUnload(module);
  return module;
}

static void *load_late(void *bytes) {
  ptr image[8] = { 0x464c457f, 0, 0, 0, 0, (size_t)bytes };
  void *module;
  must(cuCtxSetCurrent(context));
  must(cuModuleLoadDataEx(&module, image, 0, 0, 0));
  return bytes;
}

// A context with an image ends while another image is loaded for long.
static void context_beside_an_image(void) {
  void *other;
  pthread_t first;
  image(4096);
  must(cuCtxCreate_v2(&other, 0, 0));
  image(64 << 20);
  must(cuCtxSetCurrent(context));
  pthread_create(&first, 0, load_late, (void *)(100 << 20));
  until("cuModuleLoadDataEx", 1);
  usleep(100000);
  must(cuCtxDestroy_v2(other));
  pthread_join(first, 0);
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
}

// An image is unloaded, of another context or of the primary one, or has been loaded there and that is not told yet; meanwhile the primary context is ended and made
// anew, with images in it.
static void primary_anew(const char *what) {
  void *other, *images[2];
  pthread_t first;
  int is_load = !strcmp(what, "load");
  if (!strcmp(what, "other")) must(cuCtxCreate_v2(&other, 0, 0));
  if (is_load) pthread_create(&first, 0, load_late, (void *)4096);
  else pthread_create(&first, 0, unload_late, image(4096));
  until(is_load ? "cuModuleLoadDataEx" : "cuModuleUnload", 1);
  usleep(100000);
  must(cuDevicePrimaryCtxReset_v2(0));
  must(cuDevicePrimaryCtxRetain(&context, 0));
  must(cuCtxSetCurrent(context));
  images[0] = image(4096);
  images[1] = image(100 << 20);
  pthread_join(first, 0);
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
  for (int i = 0; i < 2; i++) must(cuModuleUnload(images[i]));
  printf("left %zu\ngiven-in-the-end %llu\n", charged(), fake_cuda_given(0));
}

static void *too_large(void *unused) {
  ptr image[8] = { 0x464c457f, 0, 0, 0, 0, 256 << 20 };
  void *module;
  must(cuCtxSetCurrent(context));
  if (cuModuleLoadData(&module, image) != 2) abort();
  return unused;
}

static void *load_large(void *unused) {
  must(cuCtxSetCurrent(context));
  image(100 << 20);
  return unused;
}

static void *make_context(void *unused) {
  void *other;
  must(cuCtxCreate_v2(&other, 0, 0));
  return unused;
}

// An image is loaded and a context made, the one of them when the other has been under way for long.
static void context_and_image(int is_image_first) {
  pthread_t first;
  pthread_create(&first, 0, is_image_first ? load_large : make_context, 0);
  until(is_image_first ? "cuModuleLoadData" : "cuCtxCreate_v2", 1);
  if (is_image_first) make_context(0);
  else load_large(0);
  pthread_join(first, 0);
  must(cuCtxSetCurrent(context));
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
}

static void *one_too_many(void *unused) {
  ptr image[8] = { 0x464c457f, 0, 0, 0, 0, 4096 };
  void *module;
  must(cuCtxSetCurrent(context));
  if (cuModuleLoadData(&module, image) != 2) abort();
  return unused;
}

// A small image is refused for the block that it has opened, as so many bytes are all that there is, and is unloaded, which waits;
// another one gets into that block meanwhile.
static void image_in_the_block_of_a_refused_one(size_t bytes) {
  ptr image[8] = { 0x464c457f, 0, 0, 0, 0, 4096 }, all;
  void *module;
  pthread_t first;
  must(cuMemAlloc_v2(&all, bytes));
  pthread_create(&first, 0, one_too_many, 0);
  until("cuModuleUnload", 1);
  must(cuMemFree_v2(all));
  must(cuModuleLoadData(&module, image));
  pthread_join(first, 0);
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
  must(cuModuleUnload(module));
  printf("left %zu\n", charged());
}

static void *too_much(void *unused) {
  must(cuCtxSetCurrent(context));
  if (cuCtxSetLimit(2, 256 << 20) != 2) abort();
  return unused;
}

// An image for which there is no room is unloaded, or a context's heap is made small again, which waits; an array is made on another
// card meanwhile.
static void array_beside_what_is_refused(int is_heap) {
  pthread_t first;
  void *there, *array;
  must(cuDevicePrimaryCtxRetain(&there, 1));
  must(cuCtxSetCurrent(there));
  pthread_create(&first, 0, is_heap ? too_much : too_large, 0);
  if (is_heap) until("cuCtxSetLimit", 2);
  else until("cuModuleUnload", 1);
  TIMED(cuArray3DCreate_v2(&array, &small));
  must(cuCtxSetCurrent(context));
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
  pthread_join(first, 0);
  printf("left %zu\n", charged());
}

static void *fail_to_set_back(void *unused) {
  until("cuCtxSetLimit", 1);
  usleep(100000);
  fake_cuda_fail("cuCtxSetLimit", 999, 1);
  return unused;
}

// A context's heap is made larger than there is room for, and cannot be set back; then the program does that.
static void heap_that_stays(void) {
  pthread_t first;
  ptr address;
  must(cuMemAlloc_v2(&address, 128 << 20));
  pthread_create(&first, 0, fail_to_set_back, 0);
  if (cuCtxSetLimit(2, 200 << 20) != 2) abort();
  pthread_join(first, 0);
  printf("charged %zu\ngiven %llu\n", charged(), fake_cuda_given(0));
  must(cuCtxSetLimit(2, 8 << 20));
  printf("left %zu\ngiven-in-the-end %llu\n", charged(), fake_cuda_given(0));
}

int main(int argc, char **argv) {
  pthread_t first, second;
  ptr address;
  if (argc < 2) return 2;
  must(cuInit(0));
  if (!strcmp(argv[1], "open")) {
    pthread_create(&first, 0, open_library, argv[2]);
    usleep(100000);
    must(cuDevicePrimaryCtxRetain(&context, 0));
    pthread_join(first, 0);
    puts("done");
    return 0;
  }
  must(cuDevicePrimaryCtxRetain(&context, 0));
  must(cuCtxSetCurrent(context));
  if (!strcmp(argv[1], "free")) {
    ptr image[8] = { 0x464c457f };
    void *module, *kernel;
    must(cuModuleLoadData(&module, image));
    must(cuModuleGetFunction(&kernel, module, "busy_5s"));
    must(cuMemAlloc_v2(&address, 32 << 20));
    must(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
    pthread_create(&first, 0, tell_when_freeing, 0);
    must(cuMemFree_v2(address));
    pthread_join(first, 0);
    puts("1");
    return 0;
  }
  if (!strcmp(argv[1], "arrays")) arrays_beside_a_free(atoi(argv[2]), atol(argv[3]));
  else if (!strcmp(argv[1], "ends")) array_when_a_free_ends(atoi(argv[2]), atoi(argv[3]));
  else if (!strcmp(argv[1], "ended")) arrays_beside_an_end();
  else if (!strcmp(argv[1], "gone")) thing_that_is_gone(argv[2], !strcmp(argv[3], "context"));
  else if (!strcmp(argv[1], "queue")) arrays_beside_a_queue();
  else if (!strcmp(argv[1], "refusals")) refusals_beside_a_queue();
  else if (!strcmp(argv[1], "credit")) array_for_another();
  else if (!strcmp(argv[1], "kept")) heap_that_stays();
  else if (!strcmp(argv[1], "departure")) context_beside_an_image();
  else if (!strcmp(argv[1], "anew")) primary_anew(argv[2]);
  else if (!strcmp(argv[1], "both")) context_and_image(!strcmp(argv[2], "image"));
  else if (!strcmp(argv[1], "shares")) image_in_the_block_of_a_refused_one(atol(argv[2]));
  else if (!strcmp(argv[1], "refused")) array_beside_what_is_refused(!strcmp(argv[2], "heap"));
  else if (!strcmp(argv[1], "load")) {
    pthread_create(&first, 0, load, 0);
    until("cuModuleLoadData", 1);
    arrays_and_limits();
  } else if (!strcmp(argv[1], "graph")) {
    // A graph waits for room in its queue with the card's graph pool in its hand.
    void *stream, *exec, *other;
    must(cuStreamCreate(&stream, 1));
    exec = captured(stream);
    other = captured(stream);
    pthread_create(&first, 0, launch, exec);
    until("cuGraphLaunch", 1);
    TIMED(cuMemFree_v2(0));
    TIMED(cuStreamSynchronize(stream));
    TIMED(cuGraphExecDestroy(other));
    TIMED(cuDeviceGraphMemTrim(0));
    captured(stream);
  } else {
    // The pool is known from here on.
    void *stream;
    must(cuStreamCreate(&stream, 1));
    must(cuMemAllocAsync(&address, 1 << 20, 0));
    pthread_create(&first, 0, allocate_in_order, 0);
    until("cuMemAllocAsync", 2);
    if (!strcmp(argv[1], "sync")) {
      TIMED(cuStreamSynchronize(stream));
      TIMED(cuMemFree_v2(0));
      TIMED(cuMemFree_v2(address));
    } else {
      pthread_create(&second, 0, load, 0);
      allocations();
    }
  }
  printf("longest %ld\n", longest);
  fflush(stdout);
  _exit(0);
}
#endif
