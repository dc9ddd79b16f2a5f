// Loads a library into a namespace of its own, where this one does not see what it binds to, and then uses a card.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int main(void) {
  void *other = dlmopen(LM_ID_NEWLM, "libm.so.6", RTLD_NOW);
  void *same = dlmopen(LM_ID_BASE, "libm.so.6", RTLD_NOW);
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
  int (*init)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : 0;
  printf("%s %s init %d\n", other ? "other" : dlerror(), same ? "same" : dlerror(), init ? init(0) : -1);
  return 0;
}
