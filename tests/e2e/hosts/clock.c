/* A wall clock that is CLOCK_AHEAD_S seconds ahead, for programs that preload this library. Other clocks stay. */

struct timespec { long seconds, nanoseconds; };
struct timeval { long seconds, microseconds; };

extern char *getenv(const char *);
extern long strtol(const char *, char **, int);
extern void *dlsym(void *, const char *);

enum { REALTIME = 0, REALTIME_COARSE = 5 };
static void *const NEXT = (void *)-1;

static int (*kernel)(int, struct timespec *);
static long ahead_s;

int clock_gettime(int clock, struct timespec *now)
{
    if (!kernel) {
        const char *given = getenv("CLOCK_AHEAD_S");
        ahead_s = given ? strtol(given, 0, 10) : 0;
        kernel = (int (*)(int, struct timespec *))dlsym(NEXT, "clock_gettime");
    }
    int failed = kernel(clock, now);
    if (!failed && (clock == REALTIME || clock == REALTIME_COARSE))
        now->seconds += ahead_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec exact;
    (void)zone;
    clock_gettime(REALTIME, &exact);
    now->seconds = exact.seconds;
    now->microseconds = exact.nanoseconds / 1000;
    return 0;
}

long time(long *also)
{
    struct timespec now;
    clock_gettime(REALTIME, &now);
    if (also)
        *also = now.seconds;
    return now.seconds;
}
