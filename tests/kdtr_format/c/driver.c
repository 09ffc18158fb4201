/* kdtr.h for the tests.

   driver judge                 stdin: many files, each a u32 length and its bytes; a line for each
   driver show PATH             the same line for one file, through kdtr_open
   driver copy FROM TO          reads all and writes it again, last tensor first
   driver put TO METADATA ALIGNMENT [NAME DTYPE NDIM SIZES.. HEX]..

   The line: "0 minor metadata entry.." if the file is accepted with all its payloads,
   otherwise the step that refuses and the error's text. Bytes are in hex, "-" is none. */
#define KDTR_IMPLEMENTATION
#include "kdtr.h"

static void hex(const void *bytes, size_t n)
{
    const unsigned char *p = (const unsigned char *)bytes;
    if (n == 0) putchar('-');
    for (size_t i = 0; i < n; i++) printf("%02x", p[i]);
}

static void must(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "driver: %s\n", what);
        abort();
    }
}

static void say(kdtr_file *file)
{
    kdtr_tensor t, again;
    size_t meta_size;
    const char *metadata = kdtr_metadata(file, &meta_size);
    if (file->status || kdtr_verify(file)) {
        printf("%d %s\n", file->status, file->error);
        return;
    }
    printf("0 %u ", (unsigned)file->minor);
    hex(metadata, meta_size);
    for (uint64_t i = 0; i < file->n_entries; i++) {
        must(kdtr_at(file, i, &t) == 0 && t.data == NULL, "kdtr_at");
        must(kdtr_get(file, t.name, &again) == 0, "kdtr_get");
        must(memcmp(t.name, again.name, sizeof t.name) == 0 && again.offset == t.offset, "the "
                                                                                         "name");
        putchar(' ');
        hex(t.name, strlen(t.name));
        printf(":%s:", kdtr_dtype_name(t.dtype));
        for (uint32_t k = 0; k < t.ndim; k++)
            printf("%s%llu", k ? "," : "", (unsigned long long)t.shape[k]);
        printf(":%llu:%llu:%08x:", (unsigned long long)t.offset, (unsigned long long)t.n_bytes,
               (unsigned)t.crc);
        hex(again.data, (size_t)t.n_bytes);
    }
    putchar('\n');
}

static int judge(void)
{
    unsigned char length[4];
    setvbuf(stdout, NULL, _IOLBF, 1 << 16); /* a crash leaves the lines before it */
    for (size_t number = 0; fread(length, 1, 4, stdin) == 4; number++) {
        /* a block of its own, so that a read past the file's end is seen; sometimes not aligned */
        size_t n = (size_t)kdtr_load(length, 4), odd = number % 2;
        unsigned char *block = (unsigned char *)malloc(n + odd + (n + odd == 0));
        kdtr_file file;
        kdtr_tensor t;
        must(block != NULL && fread(block + odd, 1, n, stdin) == n, "stdin");
        if (kdtr_from_memory(&file, block + odd, n)) {
            must(file.n_entries == 0 && file.bytes == NULL, "a refused file hands out something");
        } else {
            kdtr_file mine = file;
            must(kdtr_get(&mine, "no/such tensor", &t) == KDTR_UNKNOWN && t.data == NULL, "unknow"
                                                                                          "n");
            must(kdtr_at(&mine, file.n_entries, &t) == KDTR_UNKNOWN, "past the last");
        }
        say(&file);
        kdtr_close(&file);
        free(block);
    }
    return 0;
}

static int show(const char *path)
{
    kdtr_file file;
    kdtr_open(&file, path);
    must(file.bytes == NULL || (uintptr_t)file.bytes % 4096 == 0, "the block's alignment");
    say(&file);
    kdtr_close(&file);
    return 0;
}

static int write_or_say(const char *path, const kdtr_tensor *tensors, size_t n,
                        const char *metadata, size_t meta_size, uint32_t alignment)
{
    char error[KDTR_ERROR_SIZE];
    int status = kdtr_write(path, tensors, n, metadata, meta_size, alignment, error);
    if (status) printf("%d %s\n", status, error);
    return status;
}

static int copy(const char *from, const char *to)
{
    kdtr_file file;
    kdtr_tensor *tensors;
    size_t n, meta_size;
    const char *metadata;
    int status;
    must(kdtr_open(&file, from) == 0, file.error);
    n = (size_t)file.n_entries;
    tensors = (kdtr_tensor *)calloc(n + 1, sizeof *tensors);
    must(tensors != NULL, "memory");
    for (size_t i = 0; i < n; i++) {
        kdtr_tensor t;
        must(kdtr_at(&file, i, &t) == 0 && kdtr_check(&file, &t) == 0, file.error);
        tensors[n - 1 - i] = kdtr_make(t.name, t.dtype, t.ndim, t.shape, t.data);
        /* what follows the name's NUL must not reach the file */
        memset(tensors[n - 1 - i].name + strlen(t.name) + 1, 'x',
               KDTR_NAME_SIZE - 1 - strlen(t.name));
    }
    metadata = kdtr_metadata(&file, &meta_size);
    status = write_or_say(to, tensors, n, metadata, meta_size, file.alignment);
    free(tensors);
    kdtr_close(&file);
    return status;
}

static int put(int n_words, char **words)
{
    static kdtr_tensor tensors[8];
    static unsigned char data[8][64];
    size_t n = 0;
    int at = 3;
    for (; at < n_words; n++) {
        uint64_t shape[KDTR_MAX_NDIM + 1] = {0};
        const char *name = words[at++];
        uint32_t dtype = (uint32_t)strtoul(words[at++], NULL, 10);
        uint32_t ndim = (uint32_t)strtoul(words[at++], NULL, 10);
        for (uint32_t k = 0; k < ndim; k++) shape[k] = strtoull(words[at++], NULL, 10);
        for (size_t k = 0; k < strlen(words[at]) / 2; k++) {
            char pair[3] = {words[at][2 * k], words[at][2 * k + 1], '\0'};
            data[n][k] = (unsigned char)strtoul(pair, NULL, 16);
        }
        tensors[n] = kdtr_make(name, dtype, ndim, shape, words[at][0] ? data[n] : NULL);
        at++;
    }
    return write_or_say(words[0], tensors, n, words[1], strlen(words[1]),
                        (uint32_t)strtoul(words[2], NULL, 10));
}

int main(int n_words, char **words)
{
    if (n_words == 2 && strcmp(words[1], "judge") == 0) return judge();
    if (n_words == 3 && strcmp(words[1], "show") == 0) return show(words[2]);
    if (n_words == 4 && strcmp(words[1], "copy") == 0) return copy(words[2], words[3]);
    if (n_words >= 5 && strcmp(words[1], "put") == 0) return put(n_words - 2, words + 2);
    fprintf(stderr, "usage: see the top of driver.c\n");
    return 2;
}
