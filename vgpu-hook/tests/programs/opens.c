// A library that opens another one by its bare name, which only its own search path leads to.
#define _GNU_SOURCE
#include <dlfcn.h>

void *opens(void) { return dlopen("beside.so", RTLD_LAZY | RTLD_DEEPBIND); }
