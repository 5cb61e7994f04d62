/* The client and the server of the egress figures: one static program, the same on both sides.

     load get N SECONDS HOST PORT PATH [PROXY_HOST PROXY_PORT [forward]]   keep-alive GETs on N connections
     load down BYTES HOST PORT [PROXY_HOST PROXY_PORT]                     one answer of that size
     load up BYTES HOST PORT [PROXY_HOST PROXY_PORT]                       one body of that size
     load hold N HOST PORT PROXY_HOST PROXY_PORT                           N tunnels, then `held`, until stdin ends
     load serve ADDRESS PORT                                               /bytes/N, and any POST

   With a proxy it asks for a tunnel (CONNECT); `forward` sends absolute-form requests instead. Prints one JSON line. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 256 * 1024, HEAD_MAX = 4096, EVENTS = 256, FDS = 4096 };

static char block[BLOCK];

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void write_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t n = write(fd, data, size);
        if (n < 0) die("write");
        data += n, size -= n;
    }
}

static int tcp(const char *address, const char *port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    if (inet_pton(AF_INET, address, &at.sin_addr) != 1) errno = EINVAL, die(address);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static int reach(const char *host, const char *port, const char *proxy, const char *proxy_port) {
    if (!proxy) return tcp(host, port);
    int fd = tcp(proxy, proxy_port);
    char text[HEAD_MAX];
    int n = snprintf(text, sizeof text, "CONNECT %s:%s HTTP/1.1\r\nHost: %s:%s\r\n\r\n", host, port, host, port);
    write_all(fd, text, n);
    size_t have = 0;
    do {
        ssize_t got = read(fd, text + have, 1);
        if (got <= 0) die("the proxy hung up");
        have += got;
    } while (have < sizeof text - 1 && (have < 4 || memcmp(text + have - 4, "\r\n\r\n", 4)));
    if (memcmp(text, "HTTP/1.1 200", 12)) {
        fprintf(stderr, "load: %.*s\n", (int)have, text);
        exit(1);
    }
    return fd;
}

/* Bytes of head and body together, or 0 while the head is not whole. */
static size_t answer_size(const char *data, size_t have) {
    const char *end = memmem(data, have, "\r\n\r\n", 4);
    if (!end) return 0;
    const char *length = strcasestr(data, "\r\ncontent-length:");
    if (!length || length > end) errno = 0, die("no content-length");
    return end + 4 - data + strtoull(length + 17, NULL, 10);
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

struct client {
    int fd;
    double since;
    size_t have;
    char data[HEAD_MAX + 8192];
};

static void get(int count, double seconds, char **to, char **via, int forward) {
    char request[HEAD_MAX];
    int size = forward
                   ? snprintf(request, sizeof request, "GET http://%s:%s%s HTTP/1.1\r\nHost: %s:%s\r\n\r\n", to[0], to[1], to[2], to[0], to[1])
                   : snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: %s:%s\r\n\r\n", to[2], to[0], to[1]);
    struct client *all = calloc(count, sizeof *all);
    size_t room = 1 << 20, n = 0;
    double *times = malloc(room * sizeof *times);
    int poller = epoll_create1(0);
    double began = now();
    for (int i = 0; i < count; i++) {
        all[i].fd = forward ? tcp(via[0], via[1]) : reach(to[0], to[1], via ? via[0] : NULL, via ? via[1] : NULL);
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        epoll_ctl(poller, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    double connected = (now() - began) / count;
    for (int i = 0; i < count; i++) all[i].since = now(), write_all(all[i].fd, request, size);
    double start = now(), last = start;
    while ((last = now()) - start < seconds) {
        struct epoll_event events[EVENTS];
        int ready = epoll_wait(poller, events, EVENTS, 1000);
        for (int i = 0; i < ready; i++) {
            struct client *c = &all[events[i].data.u32];
            ssize_t got = read(c->fd, c->data + c->have, sizeof c->data - 1 - c->have);
            if (got <= 0) die("an answer");
            c->have += got;
            c->data[c->have] = 0;
            size_t whole = answer_size(c->data, c->have);
            if (!whole || c->have < whole) continue;
            if (memcmp(c->data, "HTTP/1.1 200", 12)) errno = 0, die(c->data);
            if (n < room) times[n++] = now() - c->since;
            c->have = 0;
            c->since = now();
            write_all(c->fd, request, size);
        }
    }
    qsort(times, n, sizeof *times, by_size);
    printf("{\"per_s\": %.1f, \"p50_us\": %.1f, \"p99_us\": %.1f, \"n\": %zu, \"connect_us\": %.1f}\n", n / (last - start),
           n ? times[n / 2] * 1e6 : 0, n ? times[n * 99 / 100] * 1e6 : 0, n, connected * 1e6);
}

static void down(unsigned long long size, char **to, char **via) {
    int fd = reach(to[0], to[1], via ? via[0] : NULL, via ? via[1] : NULL);
    char request[HEAD_MAX];
    int n = snprintf(request, sizeof request, "GET /bytes/%llu HTTP/1.1\r\nHost: %s:%s\r\n\r\n", size, to[0], to[1]);
    double began = now();
    write_all(fd, request, n);
    size_t have = 0, whole = 0;
    while (!whole || have < whole) {
        ssize_t got = read(fd, block, BLOCK - 1);
        if (got <= 0) die("the answer");
        if (!whole) block[got] = 0, whole = answer_size(block, got);
        have += got;
    }
    printf("{\"MB_per_s\": %.2f}\n", size / 1e6 / (now() - began));
}

static void up(unsigned long long size, char **to, char **via) {
    int fd = reach(to[0], to[1], via ? via[0] : NULL, via ? via[1] : NULL);
    char text[HEAD_MAX];
    int n = snprintf(text, sizeof text, "POST /up HTTP/1.1\r\nHost: %s:%s\r\nContent-Length: %llu\r\n\r\n", to[0], to[1], size);
    double began = now();
    write_all(fd, text, n);
    for (unsigned long long left = size; left;) {
        size_t piece = left < BLOCK ? left : BLOCK;
        write_all(fd, block, piece);
        left -= piece;
    }
    if (read(fd, text, sizeof text) < 12 || memcmp(text, "HTTP/1.1 200", 12)) die("the answer");
    printf("{\"MB_per_s\": %.2f}\n", size / 1e6 / (now() - began));
}

static void hold(int count, char **to, char **via) {
    for (int i = 0; i < count; i++) reach(to[0], to[1], via[0], via[1]);
    printf("held\n");
    fflush(stdout);
    while (read(0, block, BLOCK) > 0) {}
}

struct guest {
    size_t have;
    unsigned long long incoming, outgoing;
    char head[HEAD_MAX];
};

static struct guest *guests[FDS];

static int serve_out(int poller, int fd, struct guest *g) {
    while (g->outgoing) {
        ssize_t n = send(fd, block, g->outgoing < BLOCK ? g->outgoing : BLOCK, MSG_NOSIGNAL);
        if (n < 0) return errno == EAGAIN ? 0 : -1;
        g->outgoing -= n;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
    return 0;
}

static int serve_head(int poller, int fd, struct guest *g) {
    char answer[256];
    char *end = memmem(g->head, g->have, "\r\n\r\n", 4);
    if (!end) return g->have < HEAD_MAX - 1 ? 0 : -1;
    unsigned long long size = 2;
    if (!memcmp(g->head, "POST", 4)) {
        char *length = strcasestr(g->head, "\r\ncontent-length:");
        g->incoming = length ? strtoull(length + 17, NULL, 10) : 0;
        g->incoming -= g->have - (end + 4 - g->head);
        g->have = 0;
        if (g->incoming) return 0;
    } else {
        char *path = strstr(g->head, "/bytes/");
        if (path) size = strtoull(path + 7, NULL, 10);
        g->have = 0;
    }
    int n = snprintf(answer, sizeof answer, "HTTP/1.1 200 OK\r\nContent-Length: %llu\r\n\r\n", size);
    if (size <= 8192) {
        static char both[256 + 8192];
        memcpy(both, answer, n);
        memset(both + n, 'x', size);
        return send(fd, both, n + size, MSG_NOSIGNAL) < 0 ? -1 : 0;
    }
    if (send(fd, answer, n, MSG_NOSIGNAL | MSG_MORE) < 0) return -1;
    g->outgoing = size;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
    return serve_out(poller, fd, g);
}

static int serve_one(int poller, int fd, struct guest *g, unsigned events) {
    static char sink[BLOCK];
    if (events & EPOLLOUT && g->outgoing) return serve_out(poller, fd, g);
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return 0;
    if (g->incoming) {
        ssize_t n = read(fd, sink, g->incoming < BLOCK ? g->incoming : BLOCK);
        if (n <= 0) return n < 0 && errno == EAGAIN ? 0 : -1;
        if ((g->incoming -= n)) return 0;
        const char *ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        return send(fd, ok, strlen(ok), MSG_NOSIGNAL) < 0 ? -1 : 0;
    }
    ssize_t n = read(fd, g->head + g->have, HEAD_MAX - 1 - g->have);
    if (n <= 0) return n < 0 && errno == EAGAIN ? 0 : -1;
    g->have += n;
    g->head[g->have] = 0;
    return serve_head(poller, fd, g);
}

static void serve(const char *address, const char *port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    struct rlimit files = {FDS, FDS};
    setrlimit(RLIMIT_NOFILE, &files);
    inet_pton(AF_INET, address, &at.sin_addr);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1, poller = epoll_create1(0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1024)) die("listen");
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct epoll_event events[EVENTS];
        int ready = epoll_wait(poller, events, EVENTS, -1);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                int made = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (made < 0) continue;
                if (made >= FDS) {
                    close(made);
                    continue;
                }
                setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                guests[made] = calloc(1, sizeof **guests);
                struct epoll_event wanted = {.events = EPOLLIN, .data.fd = made};
                epoll_ctl(poller, EPOLL_CTL_ADD, made, &wanted);
            } else if (serve_one(poller, fd, guests[fd], events[i].events)) {
                free(guests[fd]);
                close(fd);
            }
        }
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    memset(block, 'x', BLOCK);
    if (!strcmp(what, "get") && argc >= 7)
        get(atoi(argv[2]), atof(argv[3]), argv + 4, argc > 8 ? argv + 7 : NULL, argc > 9);
    else if (!strcmp(what, "down") && argc >= 5)
        down(strtoull(argv[2], NULL, 10), argv + 3, argc > 6 ? argv + 5 : NULL);
    else if (!strcmp(what, "up") && argc >= 5)
        up(strtoull(argv[2], NULL, 10), argv + 3, argc > 6 ? argv + 5 : NULL);
    else if (!strcmp(what, "hold") && argc == 7)
        hold(atoi(argv[2]), argv + 3, argv + 5);
    else if (!strcmp(what, "serve") && argc == 4)
        serve(argv[2], argv[3]);
    else {
        fprintf(stderr, "load get|down|up|hold|serve ...: see the top of load.c\n");
        return 2;
    }
    return 0;
}
