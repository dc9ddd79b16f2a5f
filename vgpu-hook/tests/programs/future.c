// Asks for a form of a function that no CUDA version of today has.
#include <dlfcn.h>
#include <stdio.h>

int main(void) {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *function = 0;
  int (*get)(const char *, void **, int, unsigned long, int *) =
      (int (*)(const char *, void **, int, unsigned long, int *))dlsym(cuda, "cuGetProcAddress_v2");
  int status = -1, result = get("cuMemAlloc", &function, 14000, 0, &status);
  printf("result %d status %d %s\n", result, status, function ? "found" : "nothing");
  return 0;
}
