/* walk ROOT [SKIP...]: every path below ROOT with all that stat and its content say, one line each, to compare two trees.
 * Paths are relative to ROOT; what is below a SKIP is left out, the SKIP itself is not. Static, for any image. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static char **skips;

static void fail(const char *what, const char *path) {
    fprintf(stderr, "%s %s: %s\n", what, path, strerror(errno));
    exit(1);
}

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

#define TURN(x, n) ((x) >> (n) | (x) << (32 - (n)))

static void block(uint32_t *h, const uint8_t *p) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | p[4 * i + 1] << 16 | p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + (TURN(w[i - 15], 7) ^ TURN(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
               (TURN(w[i - 2], 17) ^ TURN(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t a = v[0], e = v[4];
        uint32_t t = v[7] + (TURN(e, 6) ^ TURN(e, 11) ^ TURN(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + K[i] + w[i];
        uint32_t s = (TURN(a, 2) ^ TURN(a, 13) ^ TURN(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t;
        v[0] = t + s;
    }
    for (int i = 0; i < 8; i++)
        h[i] += v[i];
}

static void content(int at, const char *name) {
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t part[64];
    uint64_t total = 0;
    int fd = openat(at, name, O_RDONLY | O_NOFOLLOW);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "rb");
    size_t got;
    if (!file)
        fail("open", name);
    while ((got = fread(part, 1, 64, file)) == 64)
        block(h, part), total += 64;
    if (ferror(file))
        fail("read", name);
    total += got;
    memset(part + got, 0, 64 - got);
    part[got] = 0x80;
    if (got >= 56)
        block(h, part), memset(part, 0, 64);
    for (int i = 0; i < 8; i++)
        part[56 + i] = (uint8_t)(total * 8 >> (56 - 8 * i));
    block(h, part);
    for (int i = 0; i < 8; i++)
        printf("%08x", h[i]);
    fclose(file);
}

static void shown(const char *text) {
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if (*c > ' ' && *c < 127 && *c != '\\')
            putchar(*c);
        else
            printf("\\x%02x", *c);
}

static void walk(int at, const char *name, const char *path) {
    struct stat found;
    char target[8192];
    ssize_t length;
    if (fstatat(at, name, &found, AT_SYMLINK_NOFOLLOW))
        fail("stat", path);
    shown(*path ? path : ".");
    printf("\t%o\t%o\t%u\t%u\t%lu\t%lld\t%lld.%09ld\t", found.st_mode & S_IFMT, found.st_mode & 07777, found.st_uid,
           found.st_gid, S_ISDIR(found.st_mode) ? 0 : (unsigned long)found.st_nlink,
           S_ISREG(found.st_mode) ? (long long)found.st_size : 0, (long long)found.st_mtim.tv_sec, found.st_mtim.tv_nsec);
    if (S_ISREG(found.st_mode))
        content(at, name);
    else if (S_ISCHR(found.st_mode) || S_ISBLK(found.st_mode))
        printf("%u:%u", major(found.st_rdev), minor(found.st_rdev));
    else if (S_ISLNK(found.st_mode)) {
        if ((length = readlinkat(at, name, target, sizeof target - 1)) < 0)
            fail("readlink", path);
        target[length] = 0;
        shown(target);
    }
    printf("\t%llu\n", S_ISDIR(found.st_mode) ? 0 : (unsigned long long)found.st_ino);
    for (char **skip = skips; *skip; skip++)
        if (!strcmp(*skip, path))
            return;
    if (!S_ISDIR(found.st_mode))
        return;
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory)
        fail("opendir", path);
    for (struct dirent *each; errno = 0, (each = readdir(directory));) {
        if (!strcmp(each->d_name, ".") || !strcmp(each->d_name, ".."))
            continue;
        char *below = NULL;
        if (asprintf(&below, "%s%s%s", path, *path ? "/" : "", each->d_name) < 0)
            fail("memory", path);
        walk(dirfd(directory), each->d_name, below);
        free(below);
    }
    if (errno)
        fail("readdir", path);
    closedir(directory);
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    skips = argv + 2;
    walk(AT_FDCWD, argv[1], "");
    return fflush(stdout) ? 1 : 0;
}
