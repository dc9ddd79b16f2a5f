// Launches for some seconds, as fast as it may, and says which part of that time the card was busy, in percent:
// `shares streams COUNT US` kernels of so many us in so many streams by turns; `shares later 1 US` first 2,000 launches of
// 3 us, and the figure is of the time from two seconds after those of the same function that are longer began.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int res;
typedef unsigned long long u64;
res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuCtxSetCurrent(void *);
res cuCtxSynchronize(void);
res cuModuleLoadData(void **, const void *);
res cuModuleGetFunction(void **, void *, const char *);
res cuStreamCreate(void **, unsigned);
res cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int fake_cuda_set_duration(const char *kernel, u64 ns);
u64 fake_cuda_busy_ns(int card);

static void done(res result, const char *what) {
  if (result) { printf("%s %d\n", what, result); exit(1); }
}

static void *kernel, *streams[16];
static int count;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static void launch(long number) {
  done(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, streams[number % count], 0, 0), "launch");
}

static void launches(double seconds, int at_once) {
  double begin = now();
  for (long number = 1; now() - begin < seconds; number++) {
    launch(number);
    if (number % at_once == 0) done(cuCtxSynchronize(), "synchronize");
  }
}

int main(int words, char **word) {
  void *context, *module;
  if (words != 4) return 2;
  int later = !strcmp(word[1], "later");
  count = atoi(word[2]);
  done(cuInit(0), "init");
  done(cuDevicePrimaryCtxRetain(&context, 0), "context");
  done(cuCtxSetCurrent(context), "current");
  done(cuModuleLoadData(&module, "image"), "module");
  done(cuModuleGetFunction(&kernel, module, "work"), "function");
  for (int i = 0; i < count; i++) done(cuStreamCreate(&streams[i], 1), "stream");
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
  u64 busy = fake_cuda_busy_ns(0);
  double begin = now();
  launches(4, later ? 32 : 1 << 30);
  printf("busy %.1f\n", (fake_cuda_busy_ns(0) - busy) / 1e7 / (now() - begin));
  fflush(stdout);
  _exit(0);
}
