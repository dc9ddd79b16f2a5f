// Launches while a stream is captured and after it is gone: `captures`. One line each: launches that were measured
// (events recorded for them) and launches that asked the driver whether their stream is captured.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int res;
typedef unsigned long long u64;
res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuCtxSetCurrent(void *);
res cuCtxCreate_v2(void **, unsigned, int);
res cuCtxDestroy_v2(void *);
res cuCtxSynchronize(void);
res cuModuleLoadData(void **, const void *);
res cuModuleGetFunction(void **, void *, const char *);
res cuStreamCreate(void **, unsigned);
res cuStreamDestroy_v2(void *);
res cuStreamBeginCapture_v2(void *, int);
res cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
u64 fake_cuda_calls(const char *symbol);

static void done(res result, const char *what) {
  if (result) { printf("%s %d\n", what, result); exit(1); }
}

// A thousand launches of a kernel of 1 us, of which the library measures a few.
static void launches(const char *when, void *kernel, void *stream) {
  u64 records = fake_cuda_calls("cuEventRecord"), asked = fake_cuda_calls("cuStreamIsCapturing");
  for (int i = 0; i < 1000; i++) {
    done(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0), "launch");
    if (i % 100 == 99) usleep(10000);
  }
  printf("%s-measured %d\n", when, fake_cuda_calls("cuEventRecord") > records);
  printf("%s-asked %llu\n", when, fake_cuda_calls("cuStreamIsCapturing") - asked);
}

int main(void) {
  void *context, *other, *module, *kernel, *stream, *captured;
  done(cuInit(0), "init");
  done(cuDevicePrimaryCtxRetain(&context, 0), "context");
  done(cuCtxSetCurrent(context), "current");
  done(cuModuleLoadData(&module, "image"), "module");
  done(cuModuleGetFunction(&kernel, module, "busy_1us"), "function");
  done(cuStreamCreate(&stream, 1), "stream");
  launches("before", kernel, stream);

  done(cuStreamCreate(&captured, 1), "stream");
  done(cuStreamBeginCapture_v2(captured, 2), "begin");
  launches("beside", kernel, stream);
  launches("captured", kernel, captured);
  done(cuStreamDestroy_v2(captured), "destroy");
  launches("destroyed", kernel, stream);

  done(cuCtxCreate_v2(&other, 0, 0), "context");
  done(cuStreamCreate(&captured, 1), "stream");
  done(cuStreamBeginCapture_v2(captured, 2), "begin");
  done(cuCtxDestroy_v2(other), "destroy");
  done(cuCtxSetCurrent(context), "current");
  launches("context-destroyed", kernel, stream);
  return 0;
}
