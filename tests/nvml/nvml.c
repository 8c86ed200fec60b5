/* A fake NVIDIA library: it answers the NVML functions which the exporter and nvitop-exporter (see bench) call, from a
 * script.
 *
 * The script is the text file NVML_SCRIPT, at most 4 MiB, one answer per line. Every call reads the current file. The
 * file is replaced by rename and never changed. Words are separated by one blank. GPU is a number from 0, or `-` in a
 * call which is about no GPU; `*` is every FUNCTION. Functions are named without the version at the end. Numbers are
 * decimal; `-` as a number is all ones, NVML's "not available". Structures and return codes are those of nvml.h:
 *
 *     session NUMBER                                   another number: the driver was reloaded, initialise first
 *     gpu GPU UUID TOTAL USED UTILIZATION NAME         bytes and percent; the name may have blanks
 *     reserved GPU BYTES                               memory of the driver, neither used nor free
 *     mig GPU                                          MIG mode is on; without this line MIG is not supported
 *     instance GPU NUMBER DEVICE GI CI                 this instance of the GPU; its own lines name it by DEVICE,
 *                                                      a number from 100 on
 *     compute|graphics|mps GPU PID BYTES [GI CI]       a process on that list
 *     sample GPU PID TIMESTAMP SM MEMORY ENC DEC       microseconds and percent; returned if newer than requested
 *     gpu_sample GPU TIMESTAMP UTILIZATION             utilisation up to then, like `sample`; without such a line the
 *                                                      GPU has no samples
 *     error GPU FUNCTION CODE                          return code of that call
 *     grow GPU FUNCTION TIMES                          the list has grown so many times since its size was read
 *     hang GPU FUNCTION                                that call does not return while this line exists
 *     slow GPU FUNCTION MILLISECONDS                   duration of that call
 *     xid GPU NUMBER CODE                              an error report for waiting calls; each has another NUMBER.
 *                                                      A wait returns reports with greater numbers than at its start
 *     figure GPU FUNCTION SELECTOR VALUE...            the value of a sensor or counter; SELECTOR is a sensor, a
 *                                                      clock, a field, or error + 2 * counter, and 0 without a
 *                                                      choice. Without this line it is not supported. A field may be
 *                                                      followed by its type and by its own error code
 *
 * It needs no header and no library at build time (its loader has a libc), so that any C compiler builds it. Threads may
 * call it in parallel; only one thread at a time may read lists that grow.
 */
typedef unsigned long long u64;
typedef unsigned int u32;
typedef struct { u32 version; u64 total, reserved, free, used; } Memory;
typedef struct { u32 gpu, memory; } Rates;
typedef struct { u32 pid; u64 bytes; u32 gpu_instance, compute_instance; } Process;
typedef struct { u32 pid; u64 timestamp; u32 sm, memory, encoder, decoder; } Sample;
typedef struct { u64 timestamp, value; } GpuSample;
typedef struct { void *device; u64 type, data; u32 gpu_instance, compute_instance; } Event;
typedef struct { u64 seen, gpus; } EventSet;
typedef struct { u32 field, scope; u64 timestamp, latency; u32 type, failed; u64 value; } Field;

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { TIMEOUT = 10, GPU_NOT_FOUND = 28, INIT_FLAG_NO_GPUS = 1, XID_EVENT = 8 };
enum { GPUS_MAX = 64, INSTANCES_MAX = 7, FOLDER_BYTES = 4096, UNSIGNED_LONG_LONG = 3, CUDA_VERSION = 12020 };
enum { GPU_UTILIZATION_SAMPLES = 1, NO_GPU = -1, UNKNOWN = 999, SCRIPT_BYTES = 1 << 22, AT_FDCWD = -100, STATX_INO = 0x100 };
enum { IN_MOVED_TO = 0x80, POLLIN = 1, CLOCK_MONOTONIC = 1 };

int open(const char *path, int flags, ...);
long read(int file, void *into, unsigned long size);
int close(int file);
int usleep(u32 microseconds);
int inotify_init1(int flags);
int inotify_add_watch(int file, const char *path, u32 mask);
int poll(void *files, unsigned long count, int timeout_ms);
int clock_gettime(int clock, void *into);
int statx(int folder, const char *path, int flags, u32 mask, void *into);
char *getenv(const char *name);
void *malloc(unsigned long size);
void free(void *memory);
int pthread_once(int *done, void (*make)(void));
int pthread_key_create(u32 *key, void (*destroy)(void *));
void *pthread_getspecific(u32 key);
int pthread_setspecific(u32 key, const void *value);

/* A thread's copy of the script. Its file stays open, so that its inode number is not reused. `odd` scripts have lines
 * that make a call fail, hang, grow or take long. `length` has the length of each line at its first byte, 0 elsewhere
 * and for lines that are too long: benchmarks must not measure the search for line ends. */
typedef struct {
    int file, odd;
    u64 numbered;
    unsigned char length[SCRIPT_BYTES + 1];
    char text[SCRIPT_BYTES + 1];
} Script;

static u32 script_key;
static int script_once;
static u64 session = 0;
static u32 grown = 0;

static void forget(void *own)
{
    close(((Script *)own)->file);
    free(own);
}
static void make_key(void) { pthread_key_create(&script_key, forget); }

/* The calling thread's copy of the script. */
static Script *own_script(void)
{
    Script *own;
    pthread_once(&script_once, make_key);
    if (!(own = pthread_getspecific(script_key))) {
        pthread_setspecific(script_key, own = malloc(sizeof *own));
        own->file = -1;
    }
    return own;
}
#define script own_script()->text

/* The rest of a line which begins with `words`, or 0. */
static const char *after(const char *line, const char *words)
{
    while (*words && *line == *words)
        line++, words++;
    return *words ? 0 : line;
}

static const char *next_line(const char *line)
{
    while (*line && *line != '\n')
        line++;
    return *line ? line + 1 : line;
}

static u64 number(const char **at)
{
    u64 value = 0;
    while (**at == ' ')
        (*at)++;
    if (**at == '-') {
        (*at)++;
        return ~0ULL;
    }
    while (**at >= '0' && **at <= '9')
        value = value * 10 + (u64)(*(*at)++ - '0');
    return value;
}

static void text(const char **at, char *into, u32 size, char end)
{
    while (**at == ' ')
        (*at)++;
    while (**at && **at != '\n' && **at != end && size > 1)
        *into++ = *(*at)++, size--;
    *into = 0;
}

/* The rest of the first line from `line` on with this `kind` and GPU, or 0. */
static const char *find(const char *line, const char *kind, int gpu)
{
    const Script *own = own_script();
    for (u32 length; *line; line = (length = own->length[line - own->text]) ? line + length : next_line(line)) {
        const char *rest = after(line, kind);
        if (rest && (int)number(&rest) == gpu)
            return *rest == ' ' ? rest + 1 : rest;
    }
    return 0;
}

/* The same for a line with this function or `*`. */
static const char *find_call(const char *kind, int gpu, const char *function)
{
    const char *rest = script, *found;
    if (!own_script()->odd)
        return 0;
    while ((rest = find(rest, kind, gpu))) {
        if ((found = after(rest, function)) && (*found == ' ' || *found == '\n'))
            return found;
        if (*rest == '*')
            return rest + 1;
    }
    return 0;
}

/* The inode number of the script (statx(2): stx_ino is the word at 32 of its 256 bytes), 0 if it is missing. */
static u64 present_file(const char *path)
{
    u64 found[32];
    return path && !statx(AT_FDCWD, path, 0, STATX_INO, found) ? found[4] : 0;
}

static int load(void)
{
    const char *path = getenv("NVML_SCRIPT"), *line, *next;
    Script *own = own_script();
    long size;
    if (own->file >= 0 && own->numbered == present_file(path))
        return 1;
    if (own->file >= 0)
        close(own->file);
    do { /* the file may be replaced between the two calls */
        own->numbered = present_file(path);
        own->file = path ? open(path, 0) : -1;
    } while (own->file >= 0 && own->numbered != present_file(path) && !close(own->file));
    size = own->file < 0 ? -1 : read(own->file, own->text, SCRIPT_BYTES);
    own->text[size < 0 ? 0 : size] = 0;
    own->odd = 0;
    for (long at = 0; at <= size; at++)
        own->length[at] = 0;
    for (line = own->text; *line; line = next) {
        long length = (next = next_line(line)) - line;
        own->length[line - own->text] = length <= 255 ? (unsigned char)length : 0;
        own->odd |= after(line, "hang ") || after(line, "error ") || after(line, "grow ") || after(line, "slow ");
    }
    return size >= 0;
}

static u64 present_session(void)
{
    const char *line = script, *rest;
    for (; *line; line = next_line(line))
        if ((rest = after(line, "session ")))
            return number(&rest);
    return 0;
}

/* The start of every call: it hangs, fails, or checks that the driver was not reloaded. */
static int begin(int gpu, const char *function)
{
    const char *rest;
    do {
        if (!load())
            return UNKNOWN;
    } while (find_call("hang ", gpu, function) && !usleep(10000));
    if ((rest = find_call("slow ", gpu, function)))
        usleep((u32)number(&rest) * 1000);
    if ((rest = find_call("error ", gpu, function)))
        return (int)number(&rest);
    if (after(function, "nvmlInit"))
        return SUCCESS;
    return session && session == present_session() ? SUCCESS : UNINITIALIZED;
}

static int must_grow(int gpu, const char *function)
{
    const char *rest = find_call("grow ", gpu, function);
    grown = rest ? grown + 1 : 0;
    return rest && grown <= number(&rest);
}

static int gpu_of(const void *device) { return (int)(long)device - 1; }

int nvmlInitWithFlags(u32 flags)
{
    int failed = begin(NO_GPU, "nvmlInitWithFlags");
    if (!failed && !(flags & INIT_FLAG_NO_GPUS) && !find(script, "gpu ", 0))
        failed = GPU_NOT_FOUND;
    session = failed ? 0 : present_session();
    return failed;
}

int nvmlShutdown(void)
{
    int failed = begin(NO_GPU, "nvmlShutdown");
    session = 0;
    return failed;
}

const char *nvmlErrorString(int code) { return code ? "an error of the stand-in" : "success"; }

int nvmlDeviceGetCount_v2(u32 *count)
{
    int failed = begin(NO_GPU, "nvmlDeviceGetCount");
    for (*count = 0; !failed && find(script, "gpu ", (int)*count); ++*count)
        ;
    return failed;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device)
{
    int failed = begin((int)index, "nvmlDeviceGetHandleByIndex");
    *device = (void *)((long)index + 1);
    return failed ? failed : find(script, "gpu ", (int)index) ? SUCCESS : INVALID_ARGUMENT;
}

/* The fields of a `gpu` line; null pointers are skipped. */
static int describe(void *device, const char *function, char *uuid, Memory *memory, Rates *rates, char *name, u32 size)
{
    int failed = begin(gpu_of(device), function);
    const char *rest = failed ? 0 : find(script, "gpu ", gpu_of(device));
    const char *reserved = failed || !memory ? 0 : find(script, "reserved ", gpu_of(device));
    char unread[96];
    u64 total, used, busy, kept = reserved ? number(&reserved) : 0;
    if (!rest)
        return failed ? failed : INVALID_ARGUMENT;
    text(&rest, uuid ? uuid : unread, uuid ? size : sizeof unread, ' ');
    total = number(&rest), used = number(&rest), busy = number(&rest);
    if (memory)
        memory->total = total, memory->reserved = kept, memory->used = used, memory->free = total - kept - used;
    if (rates)
        rates->gpu = (u32)busy, rates->memory = 0;
    if (name)
        text(&rest, name, size, '\n');
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, u32 size)
{ return describe(device, "nvmlDeviceGetUUID", uuid, 0, 0, 0, size); }

int nvmlDeviceGetName(void *device, char *name, u32 size)
{ return describe(device, "nvmlDeviceGetName", 0, 0, 0, name, size); }

int nvmlDeviceGetMemoryInfo_v2(void *device, Memory *memory)
{ return describe(device, "nvmlDeviceGetMemoryInfo", 0, memory, 0, 0, 0); }

int nvmlDeviceGetUtilizationRates(void *device, Rates *rates)
{ return describe(device, "nvmlDeviceGetUtilizationRates", 0, 0, rates, 0, 0); }

int nvmlDeviceGetMigMode(void *device, u32 *current, u32 *pending)
{
    int failed = begin(gpu_of(device), "nvmlDeviceGetMigMode");
    *current = *pending = !failed && find(script, "mig ", gpu_of(device)) != 0;
    return failed ? failed : *current ? SUCCESS : NOT_SUPPORTED;
}

static int list(void *device, const char *function, const char *kind, u32 *count, Process *into)
{
    int gpu = gpu_of(device), failed = begin(gpu, function);
    u32 room = into ? *count : 0;
    const char *rest = script;
    if (failed)
        return failed;
    for (*count = 0; (rest = find(rest, kind, gpu)); ++*count) {
        u32 pid = (u32)number(&rest);
        u64 bytes = number(&rest);
        int has_instance = *rest == ' ';
        u32 gpu_instance = has_instance ? (u32)number(&rest) : ~0U, compute_instance = has_instance ? (u32)number(&rest) : ~0U;
        if (*count < room)
            into[*count] = (Process){pid, bytes, gpu_instance, compute_instance};
    }
    return *count > room || (into && must_grow(gpu, function)) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, Process *into)
{
    return list(device, "nvmlDeviceGetComputeRunningProcesses", "compute ", count, into);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, u32 *count, Process *into)
{
    return list(device, "nvmlDeviceGetGraphicsRunningProcesses", "graphics ", count, into);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, u32 *count, Process *into)
{
    return list(device, "nvmlDeviceGetMPSComputeRunningProcesses", "mps ", count, into);
}

int nvmlDeviceGetProcessUtilization(void *device, Sample *into, u32 *count, u64 seen)
{
    int gpu = gpu_of(device), failed = begin(gpu, "nvmlDeviceGetProcessUtilization");
    u32 room = into ? *count : 0;
    const char *rest = script;
    if (failed)
        return failed;
    for (*count = 0; (rest = find(rest, "sample ", gpu));) {
        Sample found;
        found.pid = (u32)number(&rest), found.timestamp = number(&rest), found.sm = (u32)number(&rest);
        found.memory = (u32)number(&rest), found.encoder = (u32)number(&rest), found.decoder = (u32)number(&rest);
        if (found.timestamp > seen && ++*count <= room)
            into[*count - 1] = found;
    }
    if (!*count)
        return NOT_FOUND;
    return *count > room || must_grow(gpu, "nvmlDeviceGetProcessUtilization") ? INSUFFICIENT_SIZE : SUCCESS;
}

/* Only samples of type 1 exist, the utilisation; their values have type 1, unsigned int. */
int nvmlDeviceGetSamples(void *device, u32 type, u64 seen, u32 *value_type, u32 *count, GpuSample *into)
{
    int gpu = gpu_of(device), failed = begin(gpu, "nvmlDeviceGetSamples"), any = 0;
    u32 room = into ? *count : 0;
    const char *rest = script;
    if (failed)
        return failed;
    *value_type = 1;
    for (*count = 0; type == GPU_UTILIZATION_SAMPLES && (rest = find(rest, "gpu_sample ", gpu)); any = 1) {
        GpuSample found;
        found.timestamp = number(&rest), found.value = (u32)number(&rest) | (u64)UNKNOWN << 32;
        if (found.timestamp > seen && (++*count <= room))
            into[*count - 1] = found;
    }
    if (!any || !*count)
        return any ? NOT_FOUND : NOT_SUPPORTED;
    return into && *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* The values of the `figure` line of this call and selector; `wide` values have 64 bits. */
static int figure(void *device, const char *function, u32 selector, u32 count, void **into, int wide)
{
    int gpu = gpu_of(device), failed = begin(gpu, function);
    const char *line = script, *rest;
    if (failed)
        return failed;
    for (; (line = find(line, "figure ", gpu)); ) {
        if (!(rest = after(line, function)) || *rest != ' ' || number(&rest) != selector)
            continue;
        for (u32 n = 0; n < count && *rest == ' '; n++) {
            u64 value = number(&rest);
            if (wide)
                *(u64 *)into[n] = value;
            else
                *(u32 *)into[n] = (u32)value;
        }
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}

int nvmlDeviceGetTemperature(void *device, u32 sensor, u32 *celsius)
{ return figure(device, "nvmlDeviceGetTemperature", sensor, 1, (void *[]){celsius}, 0); }

int nvmlDeviceGetPowerUsage(void *device, u32 *milliwatts)
{ return figure(device, "nvmlDeviceGetPowerUsage", 0, 1, (void *[]){milliwatts}, 0); }

int nvmlDeviceGetEnforcedPowerLimit(void *device, u32 *milliwatts)
{ return figure(device, "nvmlDeviceGetEnforcedPowerLimit", 0, 1, (void *[]){milliwatts}, 0); }

int nvmlDeviceGetClockInfo(void *device, u32 clock, u32 *megahertz)
{ return figure(device, "nvmlDeviceGetClockInfo", clock, 1, (void *[]){megahertz}, 0); }

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *reasons)
{ return figure(device, "nvmlDeviceGetCurrentClocksThrottleReasons", 0, 1, (void *[]){reasons}, 1); }

int nvmlDeviceGetTotalEccErrors(void *device, u32 error, u32 counter, u64 *count)
{ return figure(device, "nvmlDeviceGetTotalEccErrors", error + 2 * counter, 1, (void *[]){count}, 1); }

int nvmlDeviceGetPcieReplayCounter(void *device, u32 *count)
{ return figure(device, "nvmlDeviceGetPcieReplayCounter", 0, 1, (void *[]){count}, 0); }

int nvmlDeviceGetPowerManagementLimit(void *device, u32 *milliwatts)
{ return figure(device, "nvmlDeviceGetPowerManagementLimit", 0, 1, (void *[]){milliwatts}, 0); }

int nvmlDeviceGetFanSpeed(void *device, u32 *percent)
{ return figure(device, "nvmlDeviceGetFanSpeed", 0, 1, (void *[]){percent}, 0); }

int nvmlDeviceGetEncoderUtilization(void *device, u32 *percent, u32 *period_us)
{ return figure(device, "nvmlDeviceGetEncoderUtilization", 0, 2, (void *[]){percent, period_us}, 0); }

int nvmlDeviceGetDecoderUtilization(void *device, u32 *percent, u32 *period_us)
{ return figure(device, "nvmlDeviceGetDecoderUtilization", 0, 2, (void *[]){percent, period_us}, 0); }

/* Returns at once; a real driver measures for 20 ms. */
int nvmlDeviceGetPcieThroughput(void *device, u32 counter, u32 *kib_per_s)
{ return figure(device, "nvmlDeviceGetPcieThroughput", counter, 1, (void *[]){kib_per_s}, 0); }

/* Each field has a separate answer. */
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields)
{
    int failed = begin(gpu_of(device), "nvmlDeviceGetFieldValues");
    for (int n = 0; n < count && !failed; n++) {
        u64 type = UNSIGNED_LONG_LONG, code = SUCCESS;
        void *into[] = {&fields[n].value, &type, &code};
        int absent = figure(device, "nvmlDeviceGetFieldValues", fields[n].field, 3, into, 1);
        fields[n].type = (u32)type, fields[n].failed = absent ? (u32)absent : (u32)code;
    }
    return failed;
}

int nvmlSystemGetDriverVersion(char *version, u32 size)
{
    const char *none = "0.0";
    int failed = begin(NO_GPU, "nvmlSystemGetDriverVersion");
    text(&none, version, size, 0);
    return failed;
}

int nvmlSystemGetCudaDriverVersion(int *version)
{
    *version = CUDA_VERSION;
    return begin(NO_GPU, "nvmlSystemGetCudaDriverVersion");
}

int nvmlDeviceGetRemappedRows(void *device, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed)
{
    void *into[] = {corrected, uncorrected, pending, failed};
    return figure(device, "nvmlDeviceGetRemappedRows", 0, 4, into, 0);
}

/* The first report after `seen` about one of these GPUs, or without `into` the newest of all; its number, or 0. */
static u64 report(u64 seen, u64 gpus, Event *into)
{
    u64 found = 0;
    for (int gpu = 0; gpu < GPUS_MAX; gpu++) {
        const char *rest = script;
        while (gpus >> gpu & 1 && (rest = find(rest, "xid ", gpu))) {
            u64 numbered = number(&rest), code = number(&rest);
            if (into ? numbered > seen && (!found || numbered < found) : numbered > found) {
                found = numbered;
                if (into)
                    into->device = (void *)((long)gpu + 1), into->type = XID_EVENT, into->data = code;
            }
        }
    }
    return found;
}

int nvmlEventSetCreate(EventSet **set)
{
    int failed = begin(NO_GPU, "nvmlEventSetCreate");
    if (failed)
        return failed;
    *set = malloc(sizeof **set);
    (*set)->gpus = 0, (*set)->seen = report(0, ~0ULL, 0);
    return SUCCESS;
}

int nvmlEventSetFree(EventSet *set)
{
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *device, u64 types, EventSet *set)
{
    int failed = begin(gpu_of(device), "nvmlDeviceRegisterEvents");
    if (!failed && types & XID_EVENT)
        set->gpus |= 1ULL << gpu_of(device);
    return failed;
}

/* A file which is readable once the script was replaced, so that a wait needs no polling. */
static int changes(void)
{
    const char *path = getenv("NVML_SCRIPT");
    char folder[FOLDER_BYTES];
    u32 end = 0;
    int file = inotify_init1(0);
    for (u32 at = 0; path && path[at] && at < FOLDER_BYTES - 1; at++)
        if ((folder[at] = path[at]) == '/')
            end = at;
    folder[end] = 0;
    inotify_add_watch(file, end ? folder : ".", IN_MOVED_TO);
    return file;
}

static long now_ms(void)
{
    struct { long s, ns; } time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.s * 1000 + time.ns / 1000000;
}

/* The current report, or `TIMEOUT`. */
static int reported(EventSet *set, Event *into)
{
    int failed = begin(NO_GPU, "nvmlEventSetWait");
    u64 found;
    for (int gpu = 0; gpu < GPUS_MAX && !failed; gpu++) {
        const char *rest = set->gpus >> gpu & 1 ? find_call("error ", gpu, "nvmlEventSetWait") : 0;
        failed = rest ? (int)number(&rest) : SUCCESS;
    }
    if (failed || !(found = report(set->seen, set->gpus, into)))
        return failed ? failed : TIMEOUT;
    set->seen = found;
    return SUCCESS;
}

/* Also fails if one of the GPUs in the set has an `error` line for it. */
int nvmlEventSetWait_v2(EventSet *set, Event *into, u32 timeout_ms)
{
    struct { int file; short wanted, found; } change = { changes(), POLLIN, 0 };
    char ignored[FOLDER_BYTES];
    long until_ms = now_ms() + timeout_ms, left_ms;
    int code;
    while ((code = reported(set, into)) == TIMEOUT && (left_ms = until_ms - now_ms()) > 0
           && poll(&change, 1, (int)left_ms) > 0)
        read(change.file, ignored, sizeof ignored);
    close(change.file);
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, u32 *count)
{
    int failed = begin(gpu_of(device), "nvmlDeviceGetMaxMigDeviceCount");
    *count = INSTANCES_MAX;
    return failed;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, u32 index, void **instance)
{
    int failed = begin(gpu_of(device), "nvmlDeviceGetMigDeviceHandleByIndex");
    const char *rest = script;
    while (!failed && (rest = find(rest, "instance ", gpu_of(device))))
        if (number(&rest) == index) {
            *instance = (void *)((long)number(&rest) + 1);
            return SUCCESS;
        }
    return failed ? failed : NOT_FOUND;
}

/* The last words of the `instance` line of this device. */
static int instance_of(void *device, const char *function, u32 *gpu_instance, u32 *compute_instance)
{
    int failed = begin(gpu_of(device), function);
    for (int gpu = 0; gpu < GPUS_MAX && !failed; gpu++) {
        const char *rest = script;
        while ((rest = find(rest, "instance ", gpu))) {
            number(&rest);
            if ((int)number(&rest) != gpu_of(device))
                continue;
            *gpu_instance = (u32)number(&rest), *compute_instance = (u32)number(&rest);
            return SUCCESS;
        }
    }
    return failed ? failed : INVALID_ARGUMENT;
}

int nvmlDeviceGetGpuInstanceId(void *device, u32 *id)
{
    u32 other;
    return instance_of(device, "nvmlDeviceGetGpuInstanceId", id, &other);
}

int nvmlDeviceGetComputeInstanceId(void *device, u32 *id)
{
    u32 other;
    return instance_of(device, "nvmlDeviceGetComputeInstanceId", &other, id);
}
