// What a program in a container without a driver sees.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

extern int cuInit(unsigned) __attribute__((weak));

int main(void) {
  const char *const names[] = {"cuInit", "cuMemAlloc_v2", "cuGetProcAddress_v2", "nvmlDeviceGetMemoryInfo", "cuNoSuch"};
  void *const handles[] = {RTLD_DEFAULT, RTLD_NEXT, dlopen(NULL, RTLD_LAZY), dlopen("libc.so.6", RTLD_LAZY)};
  for (int h = 0; h < 4; h++)
    for (int n = 0; n < 5; n++) {
      dlerror();
      void *found = dlsym(handles[h], names[n]);
      printf("%d %s %s %s\n", h, names[n], found ? "found" : "nothing", dlerror() ? "error" : "no error");
      found = dlvsym(handles[h], names[n], "GLIBC_2.2.5");
      printf("%d %s versioned %s %s\n", h, names[n], found ? "found" : "nothing", dlerror() ? "error" : "no error");
    }
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
  const char *error = dlerror();
  printf("%s: %s\n", cuda ? "cuda" : "no cuda", error ? error : "no error");
  return 0;
}
