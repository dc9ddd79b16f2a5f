// Several processes race for the last room: race FILE PROCESSES ROUNDS BYTES. FILE holds the barrier. Each round all ask
// at once for more than half of the limit; told at the end: rounds with no winner, rounds with more than one.
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long ptr;
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int cuMemAlloc_v2(ptr *, size_t), cuMemFree_v2(ptr);
ptr fake_cuda_peak(int);

struct shared { atomic_uint arrived, turn, winners, none, many, wrong; };
static struct shared *shared;
static unsigned processes;

static void together(void) {
  unsigned turn = atomic_load(&shared->turn);
  if (atomic_fetch_add(&shared->arrived, 1) + 1 == processes) {
    atomic_store(&shared->arrived, 0);
    atomic_fetch_add(&shared->turn, 1);
  } else {
    for (int spins = 0; atomic_load(&shared->turn) == turn; spins++)
      if (spins > 20) sched_yield();
  }
}

int main(int argc, char **argv) {
  int file = open(argv[1], O_RDWR);
  shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  processes = atoi(argv[2]);
  int rounds = atoi(argv[3]);
  size_t bytes = strtoull(argv[4], 0, 0);
  void *context;
  if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 2;
  for (int round = 0; round < rounds; round++) {
    ptr mine = 0;
    together();
    int result = cuMemAlloc_v2(&mine, bytes);
    if (!result) atomic_fetch_add(&shared->winners, 1);
    else if (result != 2) atomic_fetch_add(&shared->wrong, 1);
    together();
    if (!result && cuMemFree_v2(mine)) return 3;
    together();
    unsigned winners = atomic_exchange(&shared->winners, 0);
    // One of them found the number, the others find 0.
    if (winners > 1) atomic_fetch_add(&shared->many, 1);
    if (winners) atomic_fetch_add(&shared->none, 1);
    together();
  }
  printf("won %u\nmany %u\nwrong %u\npeak %llu\n", atomic_load(&shared->none), atomic_load(&shared->many),
         atomic_load(&shared->wrong), fake_cuda_peak(0));
  return 0;
}
