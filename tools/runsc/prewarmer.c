/* gvisor-sentry-prewarmer: grows the descriptor table, then becomes the sentry.
 *
 * runsc's sentry takes its stdio at descriptors 253-255. Reaching them makes the
 * kernel enlarge the descriptor table, which in a process with threads waits for
 * an RCU grace period (about 15 ms). Here there is one thread, so it is free, and
 * the larger table survives execve.
 *
 * Usage (by runsc): prewarmer PROGRAM ARGV0 [ARGV1 ...]
 * No libc: it is started once per sandbox, and this is 9 kB and three system calls.
 */

enum { SYS_open = 2, SYS_close = 3, SYS_execve = 59, SYS_exit = 60, SYS_fcntl = 72 };
enum { O_CLOEXEC = 02000000, F_DUPFD_CLOEXEC = 1030, HIGHEST_STDIO_FD = 255 };
enum { EXIT_USAGE = 2, EXIT_NOT_EXECUTABLE = 127 };

static long syscall3(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c)
                     : "rcx", "r11", "memory");
    return result;
}

/* Best effort: when it fails the sentry is merely slower to start. */
static void grow_descriptor_table(void) {
    long high = syscall3(SYS_fcntl, 0, F_DUPFD_CLOEXEC, HIGHEST_STDIO_FD);
    if (high < 0) { /* descriptor 0 is closed: duplicate something else */
        long any = syscall3(SYS_open, (long)"/", O_CLOEXEC, 0);
        if (any < 0) return;
        high = syscall3(SYS_fcntl, any, F_DUPFD_CLOEXEC, HIGHEST_STDIO_FD);
        syscall3(SYS_close, any, 0, 0);
    }
    if (high >= 0) syscall3(SYS_close, high, 0, 0);
}

__attribute__((used, noreturn)) void prewarm(long *stack) {
    long argc = stack[0];
    char **argv = (char **)(stack + 1);
    char **envp = argv + argc + 1;
    if (argc < 3) syscall3(SYS_exit, EXIT_USAGE, 0, 0);
    grow_descriptor_table();
    syscall3(SYS_execve, (long)argv[1], (long)(argv + 2), (long)envp);
    for (;;) syscall3(SYS_exit, EXIT_NOT_EXECUTABLE, 0, 0);
}

__asm__(".globl _start\n"
        "_start:\n"
        "    mov %rsp, %rdi\n"
        "    and $-16, %rsp\n"
        "    call prewarm\n");
