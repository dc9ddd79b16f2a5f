// A library that is linked with the driver.
extern int cuMemAlloc_v2(void);
extern int cuGetProcAddress_v2(void);

void *deep(void) { return (void *)cuGetProcAddress_v2; }
