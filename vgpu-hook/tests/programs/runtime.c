// A program of the CUDA runtime: the answer of each call on a line.
#include <stdio.h>

// As cuda_runtime_api.h declares them (that header needs some of the compiler's).
int cudaGetDeviceCount(int *count);
int cudaMalloc(void **memory, size_t bytes);
int cudaFree(void *memory);
int cudaMemGetInfo(size_t *free_bytes, size_t *total);

int main(void) {
  size_t free_bytes = 0, total = 0;
  void *memory = NULL;
  int devices = -1;
  printf("count %d\n", cudaGetDeviceCount(&devices));
  printf("malloc %d\n", cudaMalloc(&memory, 1 << 20));
  printf("info %d\n", cudaMemGetInfo(&free_bytes, &total));
  printf("free %d\n", cudaFree(memory));
  return 0;
}
