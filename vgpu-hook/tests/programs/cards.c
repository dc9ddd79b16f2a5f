// Launches on the cards named, one after the other: `cards 0 1 0`. A hundred of a kernel of 1 ms on each.
#include <stdio.h>
#include <stdlib.h>

typedef int res;
res cuInit(unsigned);
res cuDevicePrimaryCtxRetain(void **, int);
res cuCtxSetCurrent(void *);
res cuCtxSynchronize(void);
res cuModuleLoadData(void **, const void *);
res cuModuleGetFunction(void **, void *, const char *);
res cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static void done(res result, const char *what) {
  if (result) { printf("%s %d\n", what, result); exit(1); }
}

int main(int count, char **words) {
  void *context, *module, *kernel;
  done(cuInit(0), "init");
  for (int i = 1; i < count; i++) {
    done(cuDevicePrimaryCtxRetain(&context, atoi(words[i])), "context");
    done(cuCtxSetCurrent(context), "current");
    done(cuModuleLoadData(&module, "image"), "module");
    done(cuModuleGetFunction(&kernel, module, "busy_1ms"), "function");
    for (int launch = 0; launch < 100; launch++) {
      done(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0), "launch");
      done(cuCtxSynchronize(), "synchronize");
    }
  }
  return 0;
}
