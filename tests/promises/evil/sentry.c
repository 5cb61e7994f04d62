/* A runsc that is none: `create` leaves a process behind whose control socket lies. The file `mode` beside it says how.
 * It runs no guest code. Used only in place of the real engine of a test's own node.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static void rest(long milliseconds) {
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void for_ever(int peer, const char *piece, long pause) {
    for (;; pause ? rest(pause) : (void)0)
        if (write(peer, piece, strlen(piece)) < 0)
            for (;;) rest(1000);
}

static void lie(int peer, const char *mode) {
    static char asked[65536];
    static char noise[4096];
    if (read(peer, asked, sizeof asked) <= 0) return;
    for (size_t i = 0; i + 1 < sizeof noise; i++) noise[i] = (char)(1 + (i * 7919 + i / 13) % 255);
    if (!strcmp(mode, "garbage")) for_ever(peer, noise, 0);
    if (!strcmp(mode, "brackets")) for_ever(peer, "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 0);
    if (!strcmp(mode, "braces")) for_ever(peer, "{}", 0);
    if (!strcmp(mode, "string")) {
        if (write(peer, "{\"err\":\"", 8) < 0) return;
        memset(noise, 'x', sizeof noise - 1);
        for_ever(peer, noise, 0);
    }
    if (!strcmp(mode, "slow")) {
        if (write(peer, "{\"err\":\"", 8) < 0) return;
        for_ever(peer, "x", 50);
    }
    if (!strcmp(mode, "list") && write(peer, "[true]", 6) < 0) return;
    if (!strcmp(mode, "escapes")) {
        const char *text = "{\"success\":false,\"err\":\"\\u001b[2J\\u001b]52;c;aGk=\\u0007\\u202eno\"}";
        if (write(peer, text, strlen(text)) < 0) return;
    }
    if (!strcmp(mode, "closes")) return;
    for (;;) rest(1000); /* silent */
}

int main(int count, char **words) {
    char path[4200], mode[64] = "silent", *root = "";
    if (count > 1 && !strcmp(words[1], "--version")) {
        puts("runsc version release-20260905.0");
        return 0;
    }
    snprintf(path, sizeof path, "%s", words[0]);
    snprintf(strrchr(path, '/'), 16, "/mode");
    int file = open(path, O_RDONLY);
    ssize_t got = file < 0 ? 0 : read(file, mode, sizeof mode - 1);
    if (got > 0) mode[got] = 0;
    close(file);
    for (int i = 1; i < count; i++)
        if (!strncmp(words[i], "--root=", 7)) root = words[i] + 7;
    const char *id = words[count - 1];
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/runsc-%s.sock", root, id);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8)) return perror("bind"), 1;
    pid_t child = fork();
    if (child == 0) {
        setsid();
        for (;;) {
            int peer = accept(listener, NULL, NULL);
            if (peer < 0) return 0;
            lie(peer, mode);
            close(peer);
        }
    }
    snprintf(path, sizeof path, "%s/%s_sandbox:%s.state", root, id, id);
    FILE *state = fopen(path, "w");
    if (!state) return perror("state"), 1;
    fprintf(state, "{\"sandbox\":{\"pid\":%d},\"goferPid\":0}", child);
    fclose(state);
    return 0;
}
