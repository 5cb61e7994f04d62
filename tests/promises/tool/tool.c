/* The whole content of a scratch image: says how it was started, or does one small thing. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char here[4096];
    if (argc > 1 && !strcmp(argv[1], "sleep"))
        return sleep(600), 0;
    if (argc > 2 && !strcmp(argv[1], "touch"))
        return open(argv[2], O_WRONLY | O_CREAT, 0644) < 0;
    if (argc > 1 && !strcmp(argv[1], "connect")) {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(80)};
        address.sin_addr.s_addr = htonl(0xC0000201); /* 192.0.2.1 */
        return connect(socket(AF_INET, SOCK_STREAM, 0), (void *)&address, sizeof address) ? 7 : 0;
    }
    for (int at = 1; at < argc; at++)
        printf("%s ", argv[at]);
    printf("uid=%d cwd=%s A=%s\n", (int)getuid(), getcwd(here, sizeof here), getenv("A") ? getenv("A") : "-");
    return 0;
}
