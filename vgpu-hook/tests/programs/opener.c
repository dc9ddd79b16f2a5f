// Loads a library, which opens another one.
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
  void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : 0;
  void *(*opens)(void) = library ? (void *(*)(void))dlsym(library, "opens") : 0;
  puts(opens && opens() ? "opened" : "not opened");
  return 0;
}
