// Loads a library that is to be bound to its own needs first, and says where its functions come from.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  void *deep = dlopen("deep.so", RTLD_NOW | RTLD_DEEPBIND);
  if (!deep) { puts(dlerror()); return 1; }
  void *(*address)(void) = (void *(*)(void))dlsym(deep, "deep");
  Dl_info info;
  if (!dladdr(address(), &info)) return 1;
  puts(strrchr(info.dli_fname, '/') + 1);
  return 0;
}
