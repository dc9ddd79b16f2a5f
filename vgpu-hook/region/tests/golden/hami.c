/* Writes one usage file of each of HAMi's layouts, as lines of 16 bytes with their offset; lines of zeros are left out
 * and the first line gives the file's length. The structs are typed after HAMi-core's headers of the commits that were
 * released, so that the compiler lays them out and not we:
 *
 *     gcc -o hami hami.c && for l in pre-v0 v0 v1.1 v1.1-shifted v1.2; do ./hami $l >hami-$l.hex; done
 */
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 16
#define SLOTS 1024
#define MAGIC 19920718

typedef struct { uint64_t context, module, data, offset, total; } mem40;
typedef struct { uint64_t context, module, data, offset, total, unused[3]; } mem64;
typedef struct { uint64_t dec, enc, sm; } util24;
typedef struct { uint64_t dec, enc, sm, unused[3]; } util48;

typedef struct { int32_t pid, hostpid; mem40 used[DEVICES]; uint64_t monitorused[DEVICES]; int32_t status; } slot_pre;
typedef struct {
    int32_t pid, hostpid; mem40 used[DEVICES]; uint64_t monitorused[DEVICES]; util24 util[DEVICES]; int32_t status;
} slot_v0;
typedef struct {
    int32_t pid, hostpid; mem64 used[DEVICES]; uint64_t monitorused[DEVICES]; util48 util[DEVICES]; int32_t status;
    uint64_t seqlock, unused[2];
} slot_v1;
typedef struct {
    int32_t pid, hostpid; uint64_t seqlock; mem64 used[DEVICES]; uint64_t monitorused[DEVICES]; util48 util[DEVICES];
    int32_t status; uint64_t unused[2];
} slot_shifted;

typedef char uuids_t[DEVICES][96];
#define OLD(slot) struct { \
    int32_t magic, sm_init; size_t owner; sem_t sem; uint64_t num; uuids_t uuids; uint64_t limit[DEVICES], sm[DEVICES]; \
    slot procs[SLOTS]; int32_t proc_num, sw, recent, priority; }
typedef OLD(slot_pre) pre_v0;
typedef OLD(slot_v0) v0;
typedef struct {
    int32_t magic; uint32_t major, minor; int32_t sm_init; size_t owner; sem_t sem; uint64_t num; uuids_t uuids;
    uint64_t limit[DEVICES], sm[DEVICES]; slot_v1 procs[SLOTS]; int32_t proc_num, sw, recent, priority;
    uint64_t last; union { uint64_t unused[4]; sem_t postinit; };
} v1;
typedef struct {
    int32_t magic; uint32_t major, minor; int32_t sm_init; size_t owner; sem_t sem, postinit; uint64_t num; uuids_t uuids;
    uint64_t limit[DEVICES], sm[DEVICES]; slot_shifted procs[SLOTS]; int32_t proc_num, sw, recent, priority;
    uint64_t last, unused[4];
} shifted;

static void dump(const void *region, size_t size) {
    const unsigned char *bytes = region;
    size_t length = size + 1; /* the library writes one zero byte behind the struct */
    printf("length %zu\n", length);
    for (size_t line = 0; line < size; line += 16) {
        size_t count = size - line < 16 ? size - line : 16;
        int any = 0;
        for (size_t i = 0; i < count; i++) any |= bytes[line + i];
        if (!any) continue;
        printf("%08zx:", line);
        for (size_t i = 0; i < count; i++) printf(" %02x", bytes[line + i]);
        printf("\n");
    }
}

/* Two cards, processes in slots 0 and 1023, each field another number. */
#define HEADER(r) do { \
    r->magic = MAGIC; r->owner = 0; sem_init(&r->sem, 1, 1); r->num = 2; \
    strcpy(r->uuids[0], "GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa01"); \
    strcpy(r->uuids[1], "GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa02"); \
    r->limit[0] = 3000ull << 20; r->limit[1] = 20ull << 30; \
    for (int i = 0; i < DEVICES; i++) r->sm[i] = 100; \
    r->sm[0] = 30; r->proc_num = SLOTS; r->sw = 1; r->recent = 2; r->priority = 1; \
} while (0)
#define SLOT(s, base) do { \
    s.pid = base + 1; s.hostpid = base + 2; s.status = 1; \
    for (int d = 0; d < 2; d++) { \
        uint64_t n = (uint64_t)base * 100 + d * 10; \
        s.used[d].context = n + 1; s.used[d].module = n + 2; s.used[d].data = n + 3; s.used[d].offset = n + 4; \
        s.used[d].total = n + 5; s.monitorused[d] = n + 6; \
    } \
} while (0)
#define UTIL(s, base) do { for (int d = 0; d < 2; d++) { \
    s.util[d].dec = base + d + 7; s.util[d].enc = base + d + 17; s.util[d].sm = base + d + 27; } } while (0)
#define V1(r, m) do { r->major = 1; r->minor = m; r->last = 1764453600; } while (0)
#define SLOTS_OF(r) do { SLOT(r->procs[0], 1000); SLOT(r->procs[SLOTS - 1], 2000); } while (0)
#define UTILS_OF(r) do { UTIL(r->procs[0], 0); UTIL(r->procs[SLOTS - 1], 50); } while (0)

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    if (!strcmp(name, "pre-v0")) {
        pre_v0 *r = calloc(1, sizeof *r); HEADER(r); SLOTS_OF(r); dump(r, sizeof *r);
    } else if (!strcmp(name, "v0")) {
        v0 *r = calloc(1, sizeof *r); HEADER(r); SLOTS_OF(r); UTILS_OF(r); dump(r, sizeof *r);
    } else if (!strcmp(name, "v1.1")) {
        v1 *r = calloc(1, sizeof *r); HEADER(r); SLOTS_OF(r); UTILS_OF(r); V1(r, 1); dump(r, sizeof *r);
    } else if (!strcmp(name, "v1.1-shifted")) {
        shifted *r = calloc(1, sizeof *r); HEADER(r); SLOTS_OF(r); UTILS_OF(r); V1(r, 1);
        sem_init(&r->postinit, 1, 1); r->procs[0].seqlock = 8; dump(r, sizeof *r);
    } else if (!strcmp(name, "v1.2")) {
        v1 *r = calloc(1, sizeof *r); HEADER(r); SLOTS_OF(r); UTILS_OF(r); V1(r, 2);
        sem_init(&r->postinit, 1, 1); r->procs[0].seqlock = 8; dump(r, sizeof *r);
    } else {
        return 2;
    }
    return 0;
}
