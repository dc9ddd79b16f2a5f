// Launches for some seconds, as fast as it may, and says which part of that time the card was busy, in percent:
// `shares streams COUNT US` kernels of so many us in so many streams by turns; `shares later 1 US` first 2,000 launches of
// 3 us, and the figure is of the time from two seconds after those of the same function that are longer began. With `bare` and
// `other` the streams are of the second card, and the thread has no current context, or the first card's. Each kernel is in a
// context of its own, which is ended at once, with `ending` (made for it) and `reset` (the primary one), and in a graph of its own
// with `graph`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int res;
typedef unsigned long long u64;
res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuDevicePrimaryCtxReset_v2(int);
res cuCtxCreate_v2(void **, unsigned, int);
res cuCtxDestroy_v2(void *);
res cuCtxSetCurrent(void *);
res cuCtxSynchronize(void);
res cuModuleLoadData(void **, const void *);
res cuModuleGetFunction(void **, void *, const char *);
res cuStreamCreate(void **, unsigned);
res cuStreamSynchronize(void *);
res cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
res cuStreamBeginCapture_v2(void *, int);
res cuStreamEndCapture(void *, void **);
res cuGraphInstantiateWithFlags(void **, void *, u64);
res cuGraphLaunch(void *, void *);
res cuGraphExecDestroy(void *);
res cuGraphDestroy(void *);
int fake_cuda_set_duration(const char *kernel, u64 ns);
u64 fake_cuda_busy_ns(int card);

static void done(res result, const char *what) {
  if (result) { printf("%s %d\n", what, result); exit(1); }
}

static void *kernel, *streams[16];
static int count, card;
static const char *how;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static void load(void) {
  void *module;
  done(cuModuleLoadData(&module, "image"), "module");
  done(cuModuleGetFunction(&kernel, module, "work"), "function");
}

static void enqueue(void *stream) { done(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0), "launch"); }

static void launch_graph(void *stream) {
  void *graph, *executable;
  done(cuStreamBeginCapture_v2(streams[1], 2), "capture");
  enqueue(streams[1]);
  done(cuStreamEndCapture(streams[1], &graph), "end of capture");
  done(cuGraphInstantiateWithFlags(&executable, graph, 0), "instantiate");
  done(cuGraphLaunch(executable, stream), "graph");
  done(cuGraphExecDestroy(executable), "end of graph");
  done(cuGraphDestroy(graph), "end of graph");
}

static void launch_and_end(void) {
  void *context;
  int reset = !strcmp(how, "reset");
  if (reset) done(cuDevicePrimaryCtxRetain(&context, 0), "context");
  else done(cuCtxCreate_v2(&context, 0, 0), "context");
  done(cuCtxSetCurrent(context), "current");
  load();
  enqueue(0);
  if (reset) done(cuDevicePrimaryCtxReset_v2(0), "reset");
  else done(cuCtxDestroy_v2(context), "destroy");
}

static void launch(long number) {
  if (!strcmp(how, "ending") || !strcmp(how, "reset")) launch_and_end();
  else if (!strcmp(how, "graph")) launch_graph(streams[0]);
  else enqueue(streams[number % count]);
}

static void launches(double seconds, int at_once) {
  double begin = now();
  for (long number = 1; now() - begin < seconds; number++) {
    launch(number);
    if (number % at_once == 0) done(cuStreamSynchronize(streams[number % count]), "synchronize");
  }
}

int main(int words, char **word) {
  void *context;
  if (words != 4) return 2;
  how = word[1];
  int later = !strcmp(how, "later"), bare = !strcmp(how, "bare");
  card = bare || !strcmp(how, "other");
  count = atoi(word[2]);
  done(cuInit(0), "init");
  done(cuDevicePrimaryCtxRetain(&context, card), "context");
  done(cuCtxSetCurrent(context), "current");
  load();
  for (int i = 0; i < count; i++) done(cuStreamCreate(&streams[i], 1), "stream");
  if (card) {
    done(cuDevicePrimaryCtxRetain(&context, 0), "the other context");
    done(cuCtxSetCurrent(bare ? 0 : context), "the other one");
  }
  u64 ns = strtoull(word[3], 0, 10) * 1000;
  if (later) {
    fake_cuda_set_duration("work", 3000);
    for (long number = 0; number < 2000; number++) {
      launch(number);
      if (number % 16 == 0) done(cuCtxSynchronize(), "synchronize");
    }
    done(cuCtxSynchronize(), "synchronize");
  }
  fake_cuda_set_duration("work", ns);
  launches(2, later ? 32 : 1 << 30);
  u64 busy = fake_cuda_busy_ns(card);
  double begin = now();
  launches(4, later ? 32 : 1 << 30);
  printf("busy %.1f\n", (fake_cuda_busy_ns(card) - busy) / 1e7 / (now() - begin));
  fflush(stdout);
  _exit(0);
}
