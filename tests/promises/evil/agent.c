/* An agent that lies: PID 1 of the evil images. It greets and binds like ours, and then does as it is told.
 *
 * /.cloche/behaviour (one line of words) says how it starts and answers RESET; the first argument of a command says
 * what that command does. Both lists are in evil/__init__.py, beside the Python that uses them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { HELLO = 1, OPEN, OPENED, DATA, CREDIT, END_OF, END, CONFIRM, ABORT, TELL, PING, PONG, RESET, STATE, RESUME };
enum { PAYLOAD_MAX = 131072, IN_MAX = 1 << 20, WORDS_MAX = 4096 };

typedef struct {
    uint32_t id;
    uint64_t limit;
} Credit;

static uint32_t crc_table[256];
static uint8_t in[IN_MAX];
static size_t in_used;
static char *behaviour[64];
static Credit credits[1024];
static uint32_t highest_host = 2;
static int stubborn;

static void die(int code) { _exit(code); }

/* ------------------------------------------------------------------ bytes */

static uint32_t crc32_of(const uint8_t *data, size_t count) {
    uint32_t crc = 0xffffffffu;
    while (count--) crc = crc_table[(crc ^ *data++) & 0xff] ^ (crc >> 8);
    return ~crc;
}

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
        crc_table[i] = c;
    }
}

static void put32(uint8_t *at, uint32_t value) {
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(value >> (8 * i));
}

static uint32_t get32(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t get64(const uint8_t *at) { return get32(at) | (uint64_t)get32(at + 4) << 32; }

static size_t frame(uint8_t *to, uint8_t kind, uint32_t stream, const void *payload, uint32_t count) {
    to[0] = kind;
    put32(to + 1, stream);
    put32(to + 5, count);
    if (count) memcpy(to + 9, payload, count);
    put32(to + 9 + count, crc32_of(to, 9 + count));
    return 13 + count;
}

static int read_some(void) {
    if (in_used == IN_MAX) in_used = 0; /* more than we care for */
    ssize_t got = read(0, in + in_used, IN_MAX - in_used);
    if (got > 0) in_used += (size_t)got;
    if (got == 0) die(0);
    return got > 0 || errno == EAGAIN || errno == EINTR ? (int)got : (die(1), 0);
}

static uint64_t noise_state = 88172645463325252u;
static int spinning; /* burn the CPU instead of waiting for room */

static uint32_t noise(void) {
    noise_state ^= noise_state << 13;
    noise_state ^= noise_state >> 7;
    noise_state ^= noise_state << 17;
    return (uint32_t)(noise_state >> 16);
}

/* Writes all; `deaf` never reads meanwhile, else input is collected so that the host is never stuck. */
static void send_all(const uint8_t *data, size_t count, int deaf) {
    while (count) {
        ssize_t sent = write(0, data, count);
        if (sent > 0) {
            data += sent;
            count -= (size_t)sent;
            continue;
        }
        if (sent < 0 && errno != EAGAIN && errno != EINTR) die(1);
        struct pollfd one = {0, (short)(POLLOUT | (deaf ? 0 : POLLIN)), 0};
        poll(&one, 1, spinning ? 0 : -1);
        if (one.revents & POLLIN) read_some();
        for (int i = 0; spinning && i < 20000; i++) noise();
    }
}

/* Streams that were answered: an ABORT that crosses an END on its way gets no second one. */
static uint8_t ended[1 << 16];

static void send_frame(uint8_t kind, uint32_t stream, const void *payload, uint32_t count) {
    static uint8_t out[PAYLOAD_MAX + 13];
    if (kind == END && stream < sizeof ended) ended[stream] = 1;
    send_all(out, frame(out, kind, stream, payload, count), 0);
}

static void send_text(uint8_t kind, uint32_t stream, const char *text) {
    send_frame(kind, stream, text, (uint32_t)strlen(text));
}

static void rest(long milliseconds) {
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&time, NULL);
}

/* ------------------------------------------------------------------ files and JSON */

static char *slurp(const char *path, size_t *count) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) return NULL;
    size_t room = 1 << 16, used = 0;
    char *text = malloc(room + 1);
    for (ssize_t got; (got = read(fd, text + used, room - used)) > 0;)
        if ((used += (size_t)got) == room) text = realloc(text, (room *= 2) + 1);
    close(fd);
    text[used] = 0;
    *count = used;
    return text;
}

/* A JSON string at `at` (after its quote) as UTF-8 in place of a fresh buffer; `*end` is after its closing quote. */
static char *json_string(const char *at, const char **end) {
    char *made = malloc(strlen(at) + 1), *to = made;
    for (; *at && *at != '"'; at++) {
        if (*at != '\\') {
            *to++ = *at;
            continue;
        }
        at++;
        if (*at == 'u') {
            char hex[5] = {at[1], at[2], at[3], at[4], 0};
            unsigned c = (unsigned)strtoul(hex, NULL, 16);
            at += 4;
            if (c < 0x80) {
                *to++ = (char)c;
            } else if (c < 0x800) {
                *to++ = (char)(0xc0 | c >> 6);
                *to++ = (char)(0x80 | (c & 63));
            } else {
                *to++ = (char)(0xe0 | c >> 12);
                *to++ = (char)(0x80 | (c >> 6 & 63));
                *to++ = (char)(0x80 | (c & 63));
            }
        } else {
            *to++ = *at == 'n' ? '\n' : *at == 't' ? '\t' : *at == 'r' ? '\r' : *at == 'b' ? '\b' : *at == 'f' ? '\f' : *at;
        }
    }
    *to = 0;
    *end = *at ? at + 1 : at;
    return made;
}

static char *field(const char *json, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "\"%s\":\"", name);
    const char *at = strstr(json, key), *end;
    return at ? json_string(at + strlen(key), &end) : NULL;
}

static int words_of(const char *json, char **words) {
    const char *at = strstr(json, "\"argv\":[");
    int count = 0;
    if (!at) return 0;
    at += 8;
    while (*at == '"' && count < WORDS_MAX - 1) {
        words[count++] = json_string(at + 1, &at);
        if (*at == ',') at++;
    }
    words[count] = NULL;
    return count;
}

/* ------------------------------------------------------------------ taking frames */

static uint64_t *limit_of(uint32_t stream) {
    Credit *one = &credits[stream / 2 % 1024];
    if (one->id != stream) {
        one->id = stream;
        one->limit = 65536;
    }
    return &one->limit;
}

typedef struct {
    uint8_t kind;
    uint32_t stream, count;
    uint8_t payload[PAYLOAD_MAX + 1];
} Frame;

/* One frame out of the input, or 0. After nonsense it looks for the next RESET, as the contract says. */
static int take(Frame *to) {
    size_t at = 0;
    static int scanning;
    int found = 0;
    while (!found) {
        while (at < in_used && (scanning ? in[at] != RESET : !in[at])) at++;
        if (in_used - at < 13) break;
        uint32_t count = get32(in + at + 5);
        int nonsense = count > PAYLOAD_MAX || in[at] > RESUME || (scanning && count != 16);
        if (!nonsense && in_used - at < 13 + count) break;
        if (nonsense || crc32_of(in + at, 9 + count) != get32(in + at + 9 + count)) {
            scanning = 1;
            at++;
            continue;
        }
        scanning = 0;
        to->kind = in[at];
        to->stream = get32(in + at + 1);
        to->count = count;
        memcpy(to->payload, in + at + 9, count);
        to->payload[count] = 0;
        at += 13 + count;
        found = 1;
    }
    memmove(in, in + at, in_used - at);
    in_used -= at;
    if (found && to->kind == CREDIT && to->count == 16) *limit_of(to->stream) = get64(to->payload + 8);
    return found;
}

static void next(Frame *to) {
    while (!take(to)) {
        struct pollfd one = {0, POLLIN, 0};
        poll(&one, 1, -1);
        read_some();
    }
}

/* ------------------------------------------------------------------ mischief of a command */


static void output(uint32_t stream, const char *data, size_t count) {
    Frame *unused = malloc(sizeof *unused);
    uint64_t at = 0;
    while (at < count) {
        uint64_t room = *limit_of(stream) - at;
        if (!room) {
            next(unused);
            continue;
        }
        uint32_t piece = (uint32_t)(count - at < room ? count - at : room);
        if (piece > 65536) piece = 65536;
        send_frame(DATA, stream, data + at, piece);
        at += piece;
    }
    free(unused);
    uint8_t offset[8];
    put32(offset, (uint32_t)count);
    put32(offset + 4, (uint32_t)((uint64_t)count >> 32));
    send_frame(END_OF, stream, offset, 8);
}

static void finish(uint32_t stream, const char *text) {
    char end[200];
    output(stream, text, strlen(text));
    snprintf(end, sizeof end, "{\"ok\":{\"code\":0,\"stdout_bytes\":%zu,\"stderr_bytes\":0}}", strlen(text));
    send_text(END, stream, end);
}

static size_t unhex(const char *text, uint8_t *to) {
    size_t count = 0;
    for (; text[0] && text[1]; text += 2) {
        char pair[3] = {text[0], text[1], 0};
        to[count++] = (uint8_t)strtoul(pair, NULL, 16);
    }
    return count;
}

/* `kind:stream:hex`; stream `s` is the command's, `e` its stderr. `raw:hex` is sent as it is. */
static size_t spec(const char *text, uint32_t own, uint8_t *to) {
    static uint8_t payload[PAYLOAD_MAX * 2];
    if (!strncmp(text, "raw:", 4)) return unhex(text + 4, to);
    const char *stream = strchr(text, ':') + 1, *hex = strchr(stream, ':') + 1;
    uint32_t id = *stream == 's' ? own : *stream == 'e' ? own + 2 : (uint32_t)strtoul(stream, NULL, 10);
    size_t count = *hex == 'z' ? strtoul(hex + 1, NULL, 10) : unhex(hex, payload); /* zN: N zeros */
    if (*hex == 'z') memset(payload, 0, count);
    return frame(to, (uint8_t)atoi(text), id, payload, (uint32_t)count);
}

static void repeat(uint64_t times, char **specs, int count, uint32_t own, int deaf) {
    size_t room = 4 << 20, cycle = 0;
    uint8_t *all = malloc(room);
    for (int i = 0; i < count; i++) cycle += spec(specs[i], own, all + cycle);
    uint64_t cycles = (times + (uint64_t)count - 1) / (uint64_t)count;
    uint64_t joined = cycle < 65536 ? 65536 / cycle : 1;
    if (joined > cycles) joined = cycles;
    for (uint64_t i = 1; i < joined; i++) memcpy(all + i * cycle, all, cycle);
    while (cycles) {
        uint64_t some = joined < cycles ? joined : cycles;
        send_all(all, some * cycle, deaf);
        cycles -= some;
        if (!deaf) in_used = 0; /* answers are read and thrown away, or the host would be stuck with them */
    }
    free(all);
}

static void opens(uint64_t times) {
    static uint8_t out[65536];
    static uint32_t id = 1;
    const char *text = "{\"op\":\"connect\",\"host\":\"\\u001b[2J\"}";
    size_t used = 0;
    while (times--) {
        used += frame(out + used, OPEN, id, text, (uint32_t)strlen(text));
        id += 2;
        if (used > sizeof out - 256 || !times) {
            send_all(out, used, 0);
            used = 0;
            in_used = 0;
        }
    }
}

/* Well-formed frames of random kinds, streams and payloads: sooner or later one is against the rules. */
static void random_frames(uint64_t times, uint32_t own) {
    static uint8_t out[1 << 17], payload[64];
    uint32_t streams[] = {0, own, own + 2, own + 4, 1, 3, 2, 0xfffffffe};
    size_t used = 0;
    while (times--) {
        for (size_t i = 0; i < sizeof payload; i++) payload[i] = (uint8_t)noise();
        uint8_t kind = (uint8_t)(noise() % 17);
        used += frame(out + used, kind, streams[noise() % 8], payload, noise() % sizeof payload);
        if (used > sizeof out - 256 || !times) {
            send_all(out, used, 0);
            used = 0;
            in_used = 0;
        }
    }
}

static void command(uint32_t own, char **words, int count) {
    static uint8_t out[PAYLOAD_MAX * 4];
    const char *what = count ? words[0] : "ok";
    char text[64];
    if (!strcmp(what, "end")) { /* end JSON: that END and nothing else */
        send_text(END, own, words[1]);
        return;
    }
    send_text(OPENED, own, "{\"pid\":7}");
    if (!strcmp(what, "ok")) {
        finish(own, count > 1 ? words[1] : "ok\n");
    } else if (!strcmp(what, "frames")) {
        for (int i = 1; i < count; i++) send_all(out, spec(words[i], own, out), 0);
    } else if (!strcmp(what, "repeat") || !strcmp(what, "repeat-deaf")) {
        repeat(strtoull(words[1], NULL, 10), words + 2, count - 2, own, !strcmp(what, "repeat-deaf"));
        snprintf(text, sizeof text, "sent %s\n", words[1]);
        finish(own, text);
    } else if (!strcmp(what, "opens")) {
        opens(strtoull(words[1], NULL, 10));
        snprintf(text, sizeof text, "sent %s\n", words[1]);
        finish(own, text);
    } else if (!strcmp(what, "random")) {
        noise_state = strtoull(words[1], NULL, 10) * 2654435769u + 88172645463325252u;
        random_frames(strtoull(words[2], NULL, 10), own);
        finish(own, "survived\n");
    } else if (!strcmp(what, "burn")) { /* the same CPU without touching the channel */
        for (;;) noise();
    } else if (!strcmp(what, "burst")) { /* floods for ever, and burns the CPU where the host makes it wait */
        spinning = 1;
        for (;;) repeat(1000, words + 1, count - 1, own, 0);
    } else if (!strcmp(what, "endless")) { /* one frame that never ends, byte by byte */
        out[0] = DATA;
        put32(out + 1, own);
        put32(out + 5, PAYLOAD_MAX);
        for (;; rest(1)) send_all(out, 9, 0), out[0] = 'x';
    } else if (!strcmp(what, "stuck")) { /* neither reads nor writes any more */
        for (;;) rest(1000);
    } else if (!strcmp(what, "deaf")) { /* reads everything, answers nothing */
        for (;;) {
            struct pollfd one = {0, POLLIN, 0};
            poll(&one, 1, -1);
            read_some();
            in_used = 0;
        }
    } else if (!strcmp(what, "hang-up")) {
        close(0);
        for (;;) rest(1000);
    } else if (!strcmp(what, "stubborn")) { /* from now on nothing that is aborted ends; PING is answered */
        stubborn = 1;
    } else if (!strcmp(what, "exit")) {
        die(3);
    } /* "hang": OPENED, and nothing more; everything else goes on */
}

/* ------------------------------------------------------------------ answers */

static void answer_from_files(uint32_t stream, const char *op, char *path) {
    char name[4200];
    size_t count = 0, end_count = 0;
    char *data = NULL, *end = NULL;
    char *tail = path ? strstr(path, "/.") : NULL;
    if (tail && !tail[2]) *tail = 0; /* `cp ID:/t/1/. place` copies into the place itself */
    if (path && (!strcmp(op, "tree.read") || !strcmp(op, "file.read"))) {
        data = slurp(path, &count);
        snprintf(name, sizeof name, "%s.end", path);
        end = slurp(name, &end_count);
        if (data && !end) end = strdup("{\"ok\":{\"files\":1,\"bytes\":0,\"errors\":[]}}");
    }
    if (!end) {
        snprintf(name, sizeof name, "/.cloche/answers/%s.data", op);
        data = slurp(name, &count);
        snprintf(name, sizeof name, "/.cloche/answers/%s.end", op);
        end = slurp(name, &end_count);
    }
    if (end && strncmp(op, "fs.stat", 7) && strncmp(op, "tree.read", 9)) send_text(OPENED, stream, "{\"size\":0,\"mode\":420}");
    if (data) output(stream, data, count);
    send_text(END, stream, end ? end : "{\"error\":{\"code\":\"unsupported\",\"message\":\"\\u001b[2Jno\\u202e\"}}");
}

static void opened(Frame *one) {
    static char *words[WORDS_MAX];
    char *json = (char *)one->payload, *op = field(json, "op");
    if (one->stream > highest_host) highest_host = one->stream;
    if (!op) return;
    if (!strcmp(op, "bind")) {
        if (!strcmp(behaviour[0], "bind-never")) return;
        const char *refusal = "{\"error\":{\"code\":\"io\",\"message\":\"\\u001b]52;c;aGk=\\u0007\\u202eno\"}}";
        send_text(END, one->stream, !strcmp(behaviour[0], "bind-refused") ? refusal : "{\"ok\":{\"users\":true}}");
        if (!strcmp(behaviour[0], "deaf-after-bind")) command(one->stream + 2, (char *[]){"deaf"}, 1);
    } else if (!strcmp(op, "exec")) {
        command(one->stream, words, words_of(json, words));
    } else {
        answer_from_files(one->stream, op, field(json, "path"));
    }
}

/* reset-silent, reset-garbage, reset-endless, reset-exit, reset-lies JSON: else an honest empty STATE. */
static void reset(Frame *one) {
    static uint8_t out[PAYLOAD_MAX];
    const char *how = behaviour[0];
    char state[200];
    snprintf(state, sizeof state, "{\"streams\":{},\"highest_host\":%u,\"highest_guest\":0}", highest_host);
    if (!strcmp(how, "reset-silent")) return;
    if (!strcmp(how, "reset-exit")) die(3);
    if (!strcmp(how, "reset-garbage")) {
        noise_state = 88172645463325252u;
        for (int i = 0; i < 512; i++) {
            for (size_t k = 0; k < sizeof out; k++) out[k] = (uint8_t)noise();
            send_all(out, sizeof out, 1);
        }
        return;
    }
    if (!strcmp(how, "reset-endless"))
        for (;;) send_all(out, sizeof out, 1);
    const char *json = !strcmp(how, "reset-lies") ? behaviour[1] : state;
    memcpy(out, one->payload, 16);
    memcpy(out + 16, json, strlen(json));
    send_frame(STATE, 0, out, (uint32_t)(16 + strlen(json)));
}

/* ------------------------------------------------------------------ the start */

static void greet(void) {
    const char *how = behaviour[0];
    if (!strcmp(how, "silent"))
        for (;;) rest(1000);
    if (!strcmp(how, "exit-at-once")) die(3);
    if (!strcmp(how, "hello-noise")) {
        noise_state = 88172645463325252u;
        static uint8_t out[1 << 20];
        for (size_t k = 0; k < sizeof out; k++) out[k] = (uint8_t)noise() | 1;
        send_all(out, sizeof out, 1);
    }
    if (!strcmp(how, "hello-endless")) {
        static uint8_t zeros[65536];
        for (;;) send_all(zeros, sizeof zeros, 1);
    }
    const char *gen = !strcmp(how, "gen") ? behaviour[1] : "1";
    const char *name = !strcmp(how, "hello-escapes") ? "\\u001b[2J\\u001b]52;c;aGk=\\u0007" : "0.1.0";
    char hello[500];
    snprintf(hello, sizeof hello,
             "{\"gen\":%s,\"agent\":\"%s\",\"arch\":\"x86_64\",\"boot\":\"%032d\",\"ops\":[\"bind\",\"exec\"]}", gen, name, 0);
    send_text(HELLO, 0, hello);
    if (!strcmp(how, "hello-twice")) send_text(HELLO, 0, hello);
    if (!strcmp(how, "exit-after-hello")) die(3);
}

int main(void) {
    static Frame one;
    size_t count;
    char *line = slurp("/.cloche/behaviour", &count);
    make_table();
    fcntl(0, F_SETFL, fcntl(0, F_GETFL) | O_NONBLOCK);
    if (!line) line = strdup("serve");
    int words = 0;
    for (char *word = strtok(line, " \n"); word && words < 63; word = strtok(NULL, " \n")) behaviour[words++] = word;
    if (!words) behaviour[words++] = "serve";
    greet();
    for (;;) {
        next(&one);
        if (one.kind == OPEN) opened(&one);
        else if (one.kind == RESET) reset(&one);
        else if (one.kind == PING) send_frame(PONG, 0, one.payload, one.count);
        else if (one.kind == ABORT && !stubborn && (one.stream >= sizeof ended || !ended[one.stream]))
            send_text(END, one.stream, "{\"error\":{\"code\":\"aborted\",\"message\":\"\"}}");
    }
}
