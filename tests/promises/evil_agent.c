/* An agent that breaks its contract, for tests/promises: static, alone in an image of its own (evil_image.py).
 *
 * It says HELLO, accepts `bind`, opens every command, and then does what the command's first word names:
 *   bad_crc      a frame whose checksum is wrong          bad_kind   a frame of a kind that does not exist
 *   too_much     more bytes than it has credit for        bad_json   END that is no JSON
 *   freeze       never reads or writes again              leave      exits
 *   hang_up      closes the channel and lives on          deaf       answers PING and nothing else
 */
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { HELLO = 1, OPEN, OPENED, DATA, CREDIT, END_ = 7, PING = 11, PONG };
static uint8_t in[131072 + 16], out[131072 + 16];

static uint32_t crc32_of(const uint8_t *data, size_t count) {
    uint32_t sum = 0xffffffff;
    while (count--) {
        sum ^= *data++;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320 : 0);
    }
    return ~sum;
}

static void put_all(const void *data, size_t count) {
    const char *at = data;
    while (count) {
        ssize_t done = write(0, at, count);
        if (done <= 0) _exit(1);
        at += done, count -= done;
    }
}

static void get_all(void *data, size_t count) {
    char *at = data;
    while (count) {
        ssize_t done = read(0, at, count);
        if (done <= 0) _exit(1);
        at += done, count -= done;
    }
}

static void send_frame(int kind, uint32_t stream, const void *payload, uint32_t length, uint32_t spoil) {
    out[0] = kind;
    memcpy(out + 1, &stream, 4);
    memcpy(out + 5, &length, 4);
    memcpy(out + 9, payload, length);
    uint32_t sum = crc32_of(out, 9 + length) ^ spoil;
    memcpy(out + 9 + length, &sum, 4);
    put_all(out, 13 + length);
}

static void send_text(int kind, uint32_t stream, const char *text) {
    send_frame(kind, stream, text, strlen(text), 0);
}

static void sleep_for_ever(void) {
    for (;;) pause();
}

static void misbehave(uint32_t stream, const char *asked) {
    static uint8_t zeros[70000];
    if (strstr(asked, "\"bad_crc\"")) send_frame(DATA, stream, "x", 1, 1);
    if (strstr(asked, "\"bad_kind\"")) send_text(77, stream, "x");
    if (strstr(asked, "\"bad_json\"")) send_text(END_, stream, "\x1b]0;title\x07");
    if (strstr(asked, "\"too_much\"")) send_frame(DATA, stream, zeros, sizeof zeros, 0);
    if (strstr(asked, "\"freeze\"")) sleep_for_ever();
    if (strstr(asked, "\"leave\"")) _exit(7);
    if (strstr(asked, "\"hang_up\"")) {
        for (int fd = 0; fd < 16; fd++) close(fd);
        sleep_for_ever();
    }
}

int main(void) {
    send_text(HELLO, 0,
              "{\"gen\":1,\"agent\":\"evil\",\"arch\":\"x86_64\",\"boot\":\"00000000000000000000000000000000\",\"ops\":[\"exec\"]}");
    for (;;) {
        uint32_t stream, length;
        do get_all(in, 1);
        while (!in[0]);
        get_all(in + 1, 8);
        memcpy(&stream, in + 1, 4);
        memcpy(&length, in + 5, 4);
        if (length > 131072) _exit(2);
        get_all(in + 9, length + 4);
        char *payload = (char *)in + 9;
        if (in[0] == PING) send_frame(PONG, 0, payload, length, 0);
        if (in[0] != OPEN) continue;
        payload[length] = 0;
        if (strstr(payload, "\"bind\"")) {
            send_text(END_, stream, "{\"ok\":{\"users\":true}}");
        } else {
            send_text(OPENED, stream, "{\"pid\":2}");
            misbehave(stream, payload);
        }
    }
}
