/* The hardware we lack: two devices behind NVML's names. The second tells its name and memory, nothing else. */
#include <stdint.h>
#include <string.h>

typedef struct { uint64_t total, free, used; } memory_t;
typedef struct { uint32_t gpu, memory; } rates_t;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

static int devices[2];

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(uint32_t *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(uint32_t index, void **handle) {
    *handle = &devices[index];
    return SUCCESS;
}
int nvmlDeviceGetName(void *handle, char *name, uint32_t length) {
    if (!handle) return INVALID_ARGUMENT;
    strncpy(name, "Tesla T4", length);
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    if (!handle) return INVALID_ARGUMENT;
    memory->total = 16106127360ULL;
    memory->used = handle == &devices[0] ? 5ULL << 30 : 0;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *handle, rates_t *rates) {
    if (handle != &devices[0]) return NOT_SUPPORTED;
    rates->gpu = 83;
    return SUCCESS;
}
