/* Makes the CUDA runtime start its driver. The prototypes are the runtime's, so that no header is needed. */
#include <stdio.h>

int cudaGetDeviceCount(int *count);
int cudaRuntimeGetVersion(int *version);

int main(void) {
    int count = 0, version = 0;
    cudaRuntimeGetVersion(&version);
    int code = cudaGetDeviceCount(&count);
    printf("%d %d %d\n", version, code, count);
    return 0;
}
