/* kdtr.h: read and write KDTR files, version 1 (FORMAT.md). C99 or C++11; nothing but libc.

   In one source file                        in the others
       #define KDTR_IMPLEMENTATION               #include "kdtr.h"
       #include "kdtr.h"

   Reading
       kdtr_file file;
       kdtr_tensor t;
       if (kdtr_open(&file, "tiny.kdtr") || kdtr_get(&file, "weights/lm_head.weight", &t))
           return fprintf(stderr, "%s\n", file.error), 1;
       upload(t.data, t.n_bytes);                    bytes of the file; t.dtype, t.ndim, t.shape
       kdtr_close(&file);

   A file is hostile until proven otherwise: opening makes the refusals of FORMAT.md, steps 1 to 6.
   There is no JSON parser here: of the metadata place, size, checksum and UTF-8 are checked, but
   not that it is canonical JSON. Step 7, the payloads: kdtr_get, kdtr_check, kdtr_verify.

   Threads: nothing is global, and a call writes to the kdtr_file only when it fails. So each thread
   takes a copy, `kdtr_file mine = *shared;`, and one of the copies is closed.

   Payloads are handed out as stored: little-endian, i4x2 packed. On a big-endian host, or where the
   memory given to kdtr_from_memory is not aligned, take elements with kdtr_load. */
#ifndef KDTR_H
#define KDTR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KDTR_NAME_SIZE = 96, /* with the NUL */
    KDTR_MAX_NDIM = 8,
    KDTR_DEFAULT_ALIGNMENT = 256,
    KDTR_ERROR_SIZE = 1024
};

/* What functions return: 0, or the step of FORMAT.md that refuses. Then error says why. */
enum {
    KDTR_OK = 0, KDTR_FILE = 1, KDTR_HEADER = 2, KDTR_CHECKSUM = 3, KDTR_ENTRY = 4, KDTR_GAP = 5,
    KDTR_METADATA = 6, KDTR_PAYLOAD = 7,
    KDTR_UNKNOWN = 8, /* the file has no such tensor */
    KDTR_WRITE = 9    /* the tensors cannot be stored, or the file cannot be written */
};

enum { /* FORMAT.md says what each holds */
    KDTR_F64 = 1, KDTR_F32 = 2, KDTR_F16 = 3, KDTR_BF16 = 4, KDTR_F8E4M3 = 5, KDTR_F8E5M2 = 6,
    KDTR_I64 = 7, KDTR_I32 = 8, KDTR_I8 = 9, KDTR_I4X2 = 10, KDTR_U64 = 11, KDTR_U32 = 12,
    KDTR_U8 = 13, KDTR_BOOL = 14
};

/* An open file. Zeroed by a failed open, so that every later call on it is harmless. */
typedef struct kdtr_file {
    const unsigned char *bytes; /* the whole file */
    uint64_t n_bytes;
    uint64_t n_entries;
    uint64_t meta_offset, meta_size, data_offset;
    uint32_t alignment;
    uint32_t minor;              /* of the format's version 1.minor */
    void *block;                 /* what kdtr_close frees */
    int status;                  /* of the call that failed last */
    char error[KDTR_ERROR_SIZE]; /* its text, cut to this size */
} kdtr_file;

typedef struct kdtr_tensor {
    char name[KDTR_NAME_SIZE]; /* UTF-8 */
    uint32_t dtype, ndim;
    uint64_t shape[KDTR_MAX_NDIM]; /* C order */
    uint64_t offset, n_bytes;      /* in the file */
    uint32_t crc;
    const void *data; /* when reading, NULL until the payload was checked */
} kdtr_tensor;

/* Reads the file into one block, aligned to 4096 bytes, and validates it. */
int kdtr_open(kdtr_file *file, const char *path);
/* Validates a file that is in memory, mapped for instance. The caller keeps it there, unchanged:
   a mapped file that is cut meanwhile ends the process with SIGBUS. */
int kdtr_from_memory(kdtr_file *file, const void *bytes, size_t n_bytes);
void kdtr_close(kdtr_file *file);

/* The metadata's bytes: UTF-8 without a terminating NUL, and not checked to be JSON. */
const char *kdtr_metadata(const kdtr_file *file, size_t *n_bytes);

/* Entry i < file->n_entries, ascending by name; kdtr_find does a binary search. data is NULL. */
int kdtr_at(kdtr_file *file, uint64_t i, kdtr_tensor *tensor);
int kdtr_find(kdtr_file *file, const char *name, kdtr_tensor *tensor);
/* Checks the payload (all of it, at each call: keep the tensor) and sets data. */
int kdtr_check(kdtr_file *file, kdtr_tensor *tensor);
/* kdtr_find, then kdtr_check. */
int kdtr_get(kdtr_file *file, const char *name, kdtr_tensor *tensor);
/* Checks every payload; the first that fails is reported. */
int kdtr_verify(kdtr_file *file);

const char *kdtr_dtype_name(uint32_t dtype); /* "bf16"; NULL for a code that is none */
uint32_t kdtr_dtype_bits(uint32_t dtype);    /* of one element; 0 for a code that is none */
uint64_t kdtr_elements(const kdtr_tensor *tensor);
/* The little-endian integer in size <= 8 bytes, at any alignment. */
uint64_t kdtr_load(const void *bytes, size_t size);
/* The CRC-32 of zlib. */
uint32_t kdtr_crc32(const void *bytes, size_t n_bytes);

/* A tensor to write. data stays the caller's: bytes as stored, see above. */
kdtr_tensor kdtr_make(const char *name, uint32_t dtype, uint32_t ndim, const uint64_t *shape,
                      const void *data);
/* Writes tensors, in any order, to a sibling of path, syncs it, and renames it to path: after a
   failure an earlier file is what it was. Equal arguments give the bytes that kdtr's Python writer
   gives. The metadata must be canonical JSON already, "{}" at least; only its frame is checked. */
int kdtr_write(const char *path, const kdtr_tensor *tensors, size_t n_tensors, const void *metadata,
               size_t meta_size, uint32_t alignment, char error[KDTR_ERROR_SIZE]);

#ifdef __cplusplus
}
#endif
#endif /* KDTR_H */

#ifdef KDTR_IMPLEMENTATION

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#define KDTR_POSIX_ 1
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#ifndef __cplusplus /* -std=c99 hides these two */
int fileno(FILE *);
int fsync(int);
#endif
#else
#define KDTR_POSIX_ 0
#endif

enum {
    kdtr_header_size_ = 128,
    kdtr_entry_size_ = 192,
    kdtr_max_meta_ = 16 * 1024 * 1024,
    kdtr_block_ = 4096,                    /* alignment of what kdtr_open reads into */
    kdtr_quoted_ = 4 * KDTR_NAME_SIZE + 3, /* a name, each byte as \xNN, in quotes */
    kdtr_list_ = 22 * KDTR_MAX_NDIM + 3
};
static const uint64_t kdtr_max_elements_ = (uint64_t)1 << 48;
static const unsigned char kdtr_magic_[8] = {0x89, 'K', 'D', 'T', 'R', '\r', '\n', 0x1a};

/* Numbers */

uint64_t kdtr_load(const void *bytes, size_t size)
{
    const unsigned char *p = (const unsigned char *)bytes;
    uint64_t value = 0;
    while (size > 0) value = value << 8 | p[--size];
    return value;
}

static void kdtr_store_(unsigned char *p, size_t size, uint64_t value)
{
    for (size_t i = 0; i < size; i++) p[i] = (unsigned char)(value >> 8 * i & 0xff);
}

static uint64_t kdtr_round_up_(uint64_t n, uint32_t alignment) /* n <= 2^63; a power of two */
{
    return (n + alignment - 1) & ~((uint64_t)alignment - 1);
}

static uint32_t kdtr_crc_byte_(uint32_t crc)
{
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1u)));
    return crc;
}

uint32_t kdtr_crc32(const void *bytes, size_t n_bytes)
{
    const unsigned char *p = (const unsigned char *)bytes;
    uint32_t c = 0xffffffffu;
    if (n_bytes >= 512) { /* eight bytes at a time; below this the tables would take longer */
        uint32_t table[8][256];
        for (uint32_t i = 0; i < 256; i++) table[0][i] = kdtr_crc_byte_(i);
        for (int k = 1; k < 8; k++)
            for (int i = 0; i < 256; i++)
                table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 0xff];
        for (; n_bytes >= 8; n_bytes -= 8, p += 8) {
            c ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
            c = table[7][c & 0xff] ^ table[6][c >> 8 & 0xff] ^ table[5][c >> 16 & 0xff] ^
                table[4][c >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^
                table[0][p[7]];
        }
    }
    for (; n_bytes > 0; n_bytes--) c = kdtr_crc_byte_(c ^ *p++);
    return c ^ 0xffffffffu;
}

/* Where the first sequence that is not UTF-8 (RFC 3629) starts, or n. */
static size_t kdtr_utf8_(const unsigned char *s, size_t n)
{
    size_t i = 0;
    while (i < n) {
        unsigned c = s[i], low = 0x80, high = 0xbf; /* bounds of the second byte */
        size_t more = c < 0x80 ? 0 : c < 0xc2 ? n : c < 0xe0 ? 1 : c < 0xf0 ? 2 : c < 0xf5 ? 3 : n;
        if (more >= n - i) return i;
        if (c == 0xe0) low = 0xa0;  /* overlong */
        if (c == 0xed) high = 0x9f; /* surrogates */
        if (c == 0xf0) low = 0x90;  /* overlong */
        if (c == 0xf4) high = 0x8f; /* past U+10FFFF */
        for (size_t k = 1; k <= more; k++, low = 0x80, high = 0xbf)
            if (s[i + k] < low || s[i + k] > high) return i;
        i += more + 1;
    }
    return n;
}

/* Texts */

/* A name in quotes, as out[kdtr_quoted_]; at most KDTR_NAME_SIZE bytes of it. Returns out. */
static const char *kdtr_quote_(char *out, const void *name)
{
    static const char digits[] = "0123456789abcdef";
    const unsigned char *p = (const unsigned char *)name;
    char *to = out;
    *to++ = '\'';
    for (size_t i = 0; i < KDTR_NAME_SIZE && p[i]; i++) {
        int plain = p[i] >= 0x20 && p[i] <= 0x7e && p[i] != '\'' && p[i] != '\\';
        if (!plain) {
            memcpy(to, "\\x", 2);
            to[2] = digits[p[i] >> 4];
            to += 3;
        }
        *to++ = plain ? (char)p[i] : digits[p[i] & 15];
    }
    *to++ = '\'';
    *to = '\0';
    return out;
}

/* "[3, 512]", as out[kdtr_list_]. Returns out. */
static const char *kdtr_print_(char *out, const uint64_t *values, uint32_t n)
{
    int at = 1;
    strcpy(out, "[");
    for (uint32_t i = 0; i < n; i++)
        at += snprintf(out + at, 23, "%s%llu", i ? ", " : "", (unsigned long long)values[i]);
    strcpy(out + at, "]");
    return out;
}

/* Writes "tensor 'name' ", if there is a name, and the text to error[KDTR_ERROR_SIZE]. */
#ifdef __GNUC__
__attribute__((format(printf, 4, 5)))
#endif
static int kdtr_fail_(char *error, int status, const void *name, const char *format, ...)
{
    char quoted[kdtr_quoted_];
    int at = name ? snprintf(error, KDTR_ERROR_SIZE, "tensor %s ", kdtr_quote_(quoted, name)) : 0;
    va_list values;
    va_start(values, format);
    vsnprintf(error + at, KDTR_ERROR_SIZE - (size_t)at, format, values);
    va_end(values);
    return status;
}

#define KDTR_CUT_ "; the file was cut or edited"
#define KDTR_U_(n) ((unsigned long long)(n))

/* Dtypes and shapes */

static const struct {
    const char *name;
    uint32_t bits;
} kdtr_dtypes_[15] = {{NULL, 0},     {"f64", 64},   {"f32", 32}, {"f16", 16}, {"bf16", 16},
                      {"f8e4m3", 8}, {"f8e5m2", 8}, {"i64", 64}, {"i32", 32}, {"i8", 8},
                      {"i4x2", 4},   {"u64", 64},   {"u32", 32}, {"u8", 8},   {"bool", 8}};

const char *kdtr_dtype_name(uint32_t dtype) { return dtype < 15 ? kdtr_dtypes_[dtype].name : NULL; }
uint32_t kdtr_dtype_bits(uint32_t dtype) { return dtype < 15 ? kdtr_dtypes_[dtype].bits : 0; }

uint64_t kdtr_elements(const kdtr_tensor *tensor)
{
    uint64_t product = 1;
    for (uint32_t i = 0; i < tensor->ndim && i < KDTR_MAX_NDIM; i++) product *= tensor->shape[i];
    return product;
}

/* Refuses a dtype and shape that no file may have; sets n_bytes to what they take. */
static int kdtr_check_type_(const kdtr_tensor *t, uint64_t *n_bytes, int status, char *error)
{
    char list[kdtr_list_];
    uint64_t product = 1; /* zeros counted as ones, so it bounds every partial product */
    if (kdtr_dtype_bits(t->dtype) == 0)
        return kdtr_fail_(error, status, t->name, "has dtype code %u; expected 1 to 14", t->dtype);
    if (t->ndim > KDTR_MAX_NDIM)
        return kdtr_fail_(error, status, t->name, "has %u dimensions; at most 8", t->ndim);
    for (uint32_t i = t->ndim; i < KDTR_MAX_NDIM; i++)
        if (t->shape[i] != 0)
            return kdtr_fail_(error, status, t->name,
                              "has %u dimensions, but the unused ones are %s; expected zeros",
                              t->ndim,
                              kdtr_print_(list, t->shape + t->ndim, KDTR_MAX_NDIM - t->ndim));
    for (uint32_t i = 0; i < t->ndim; i++) {
        uint64_t n = t->shape[i] ? t->shape[i] : 1;
        if (product > kdtr_max_elements_ / n)
            return kdtr_fail_(error, status, t->name,
                              "has shape %s; at most 2**48 elements, zeros counted as ones",
                              kdtr_print_(list, t->shape, t->ndim));
        product *= n;
    }
    *n_bytes = (kdtr_elements(t) * kdtr_dtype_bits(t->dtype) + 7) / 8;
    return KDTR_OK;
}

/* Refuses a bool that is neither 0 nor 1, and a spare nibble that is not 0. */
static int kdtr_check_values_(const kdtr_tensor *t, const void *data, int status, char *error)
{
    const unsigned char *p = (const unsigned char *)data;
    for (uint64_t i = 0; t->dtype == KDTR_BOOL && i < t->n_bytes; i++)
        if (p[i] > 1)
            return kdtr_fail_(error, status, t->name,
                              "is bool, but element %llu is %d; expected 0 or 1", KDTR_U_(i), p[i]);
    if (t->dtype == KDTR_I4X2 && t->n_bytes && kdtr_elements(t) % 2 && p[t->n_bytes - 1] >> 4)
        return kdtr_fail_(error, status, t->name, "has the spare nibble 0x%x; expected 0",
                          (unsigned)p[t->n_bytes - 1] >> 4);
    return KDTR_OK;
}

/* Validation, in the order of FORMAT.md. Each number is checked before it is computed with. */

static int kdtr_expect_(char *error, const char *field, uint64_t value, uint64_t expected)
{
    if (value == expected) return KDTR_OK;
    return kdtr_fail_(error, KDTR_HEADER, NULL, "%s is %llu; expected %llu", field, KDTR_U_(value),
                      KDTR_U_(expected));
}

static int kdtr_expect_crc_(char *error, int status, const char *part, const unsigned char *p,
                            uint64_t n_bytes, uint64_t stored)
{
    uint32_t actual = kdtr_crc32(p, (size_t)n_bytes);
    if (actual == stored) return KDTR_OK;
    return kdtr_fail_(error, status, NULL, "%s checksum is %08llx, its bytes give %08x" KDTR_CUT_,
                      part, KDTR_U_(stored), actual);
}

/* Step 2. On success the directory, the metadata and data_offset lie inside the file. */
static int kdtr_check_header_(kdtr_file *f)
{
    const unsigned char *h = f->bytes;
    const uint64_t size = f->n_bytes;
    char *error = f->error, hex[3 * 20 + 1] = "";
    uint64_t meta_end;
    if (size < 8 || memcmp(h, kdtr_magic_, 8) != 0) {
        for (unsigned i = 0; i < 8 && i < size; i++) snprintf(hex + 3 * i, 4, " %02x", h[i]);
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "not a KDTR file: it starts with%s; "
                          "expected it to start with 89 4b 44 54 52 0d 0a 1a",
                          hex);
    }
    if (size < kdtr_header_size_)
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "the file has %llu bytes, the header alone takes 128" KDTR_CUT_,
                          KDTR_U_(size));
    f->minor = (uint32_t)kdtr_load(h + 10, 2);
    /* before the checksum, which another version may keep elsewhere */
    if (kdtr_load(h + 8, 2) != 1)
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "format version %llu.%u, this reader knows 1.x; "
                          "use the kdtr that wrote the file, or regenerate it",
                          KDTR_U_(kdtr_load(h + 8, 2)), f->minor);
    if (kdtr_expect_crc_(error, KDTR_HEADER, "header", h, 124, kdtr_load(h + 124, 4)))
        return KDTR_HEADER;
    if (kdtr_load(h + 16, 8) != 0)
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "needs the features 0x%llx, this reader knows none; use a newer kdtr",
                          KDTR_U_(kdtr_load(h + 16, 8)));
    if (kdtr_expect_(error, "header_size", kdtr_load(h + 12, 4), kdtr_header_size_) ||
        kdtr_expect_(error, "entry_size", kdtr_load(h + 56, 4), kdtr_entry_size_))
        return KDTR_HEADER;
    for (int i = 0; i < 20; i++) snprintf(hex + 2 * i, 3, "%02x", h[104 + i]);
    if (strspn(hex, "0") != 40)
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "the header's reserved bytes are %s; expected zeros", hex);
    f->alignment = (uint32_t)kdtr_load(h + 60, 4);
    if (f->alignment < 64 || f->alignment > 65536 || (f->alignment & (f->alignment - 1)) != 0)
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "alignment is %u; expected a power of two from 64 to 65536",
                          f->alignment);
    if (kdtr_load(h + 88, 8) != size)
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "the header says %llu bytes, the file has %llu" KDTR_CUT_,
                          KDTR_U_(kdtr_load(h + 88, 8)), KDTR_U_(size));
    if (kdtr_expect_(error, "dir_offset", kdtr_load(h + 40, 8), kdtr_header_size_))
        return KDTR_HEADER;
    f->n_entries = kdtr_load(h + 32, 8);
    if (f->n_entries > size / kdtr_entry_size_)
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "%llu entries of 192 bytes do not fit a file of %llu",
                          KDTR_U_(f->n_entries), KDTR_U_(size));
    f->meta_offset = kdtr_load(h + 64, 8);
    if (kdtr_expect_(error, "dir_size", kdtr_load(h + 48, 8), f->n_entries * kdtr_entry_size_) ||
        kdtr_expect_(error, "meta_offset", f->meta_offset,
                     kdtr_header_size_ + f->n_entries * kdtr_entry_size_))
        return KDTR_HEADER;
    f->meta_size = kdtr_load(h + 72, 8);
    if (f->meta_size > kdtr_max_meta_)
        return kdtr_fail_(error, KDTR_HEADER, NULL, "meta_size is %llu; at most 16777216",
                          KDTR_U_(f->meta_size));
    meta_end = f->meta_offset + f->meta_size;
    f->data_offset = kdtr_load(h + 80, 8);
    if (kdtr_expect_(error, "data_offset", f->data_offset, kdtr_round_up_(meta_end, f->alignment)))
        return KDTR_HEADER;
    if (f->data_offset > size)
        return kdtr_fail_(error, KDTR_HEADER, NULL,
                          "data_offset is %llu, past the file's end at %llu" KDTR_CUT_,
                          KDTR_U_(f->data_offset), KDTR_U_(size));
    return KDTR_OK;
}

static const unsigned char *kdtr_entry_(const kdtr_file *f, uint64_t i)
{
    return f->bytes + kdtr_header_size_ + (size_t)i * kdtr_entry_size_;
}

static void kdtr_decode_(const unsigned char *entry, kdtr_tensor *t)
{
    memcpy(t->name, entry, KDTR_NAME_SIZE);
    t->dtype = (uint32_t)kdtr_load(entry + 96, 2);
    t->ndim = (uint32_t)kdtr_load(entry + 98, 2);
    for (size_t i = 0; i < KDTR_MAX_NDIM; i++) t->shape[i] = kdtr_load(entry + 104 + 8 * i, 8);
    t->offset = kdtr_load(entry + 168, 8);
    t->n_bytes = kdtr_load(entry + 176, 8);
    t->crc = (uint32_t)kdtr_load(entry + 184, 4);
    t->data = NULL;
}

static int kdtr_check_name_(kdtr_file *f, uint64_t i)
{
    const unsigned char *raw = kdtr_entry_(f, i);
    const void *nul = memchr(raw, 0, KDTR_NAME_SIZE);
    const size_t length = nul ? (size_t)((const unsigned char *)nul - raw) : 0;
    char name[kdtr_quoted_];
    int order = 1;
    kdtr_quote_(name, raw);
    if (nul == NULL)
        return kdtr_fail_(f->error, KDTR_ENTRY, NULL,
                          "entry %llu: the name has no NUL in its 96 bytes", KDTR_U_(i));
    if (length == 0)
        return kdtr_fail_(f->error, KDTR_ENTRY, NULL, "entry %llu has an empty name", KDTR_U_(i));
    for (size_t k = length; k < KDTR_NAME_SIZE; k++)
        if (raw[k] != 0)
            return kdtr_fail_(f->error, KDTR_ENTRY, NULL,
                              "entry %llu: the name %s is padded with non-zero bytes", KDTR_U_(i),
                              name);
    if (kdtr_utf8_(raw, length) != length)
        return kdtr_fail_(f->error, KDTR_ENTRY, NULL,
                          "entry %llu: the name %s is not UTF-8 at byte %llu", KDTR_U_(i), name,
                          KDTR_U_(kdtr_utf8_(raw, length)));
    /* zeros sort first and names hold none, so padded names compare as the names do */
    if (i > 0) order = memcmp(raw, raw - kdtr_entry_size_, KDTR_NAME_SIZE);
    if (order == 0)
        return kdtr_fail_(f->error, KDTR_ENTRY, raw, "is there twice; expected unique names");
    if (order < 0)
        return kdtr_fail_(f->error, KDTR_ENTRY, raw, "comes after %s; expected bytewise order",
                          kdtr_quote_(name, raw - kdtr_entry_size_));
    return KDTR_OK;
}

/* The tensor lies at the one place allowed after end, and inside the file. */
static int kdtr_check_place_(kdtr_file *f, const kdtr_tensor *t, uint64_t end)
{
    const uint64_t expected = t->n_bytes ? kdtr_round_up_(end, f->alignment) : end;
    char why[80] = "which leaves a hole";
    if (t->offset != expected) {
        if (t->offset < end)
            snprintf(why, sizeof why, "before byte %llu where the part before it ends",
                     KDTR_U_(end));
        else if (t->n_bytes && t->offset % f->alignment)
            snprintf(why, sizeof why, "not a multiple of the alignment %u", f->alignment);
        return kdtr_fail_(f->error, KDTR_ENTRY, t->name, "starts at byte %llu, %s; expected %llu",
                          KDTR_U_(t->offset), why, KDTR_U_(expected));
    }
    /* rounding up may have led past the end, where file size - offset would wrap */
    if (t->offset > f->n_bytes || t->n_bytes > f->n_bytes - t->offset)
        return kdtr_fail_(f->error, KDTR_ENTRY, t->name,
                          "spans bytes %llu..%llu, the file ends at %llu" KDTR_CUT_,
                          KDTR_U_(t->offset), KDTR_U_(t->offset + t->n_bytes), KDTR_U_(f->n_bytes));
    return KDTR_OK;
}

/* Step 4. */
static int kdtr_check_directory_(kdtr_file *f)
{
    uint64_t end = f->data_offset, needed = 0;
    char list[kdtr_list_], to[24] = "past 2**64";
    kdtr_tensor t;
    for (uint64_t i = 0; i < f->n_entries; i++) {
        const unsigned char *entry = kdtr_entry_(f, i);
        const uint64_t flags = kdtr_load(entry + 100, 4), reserved = kdtr_load(entry + 188, 4);
        if (kdtr_check_name_(f, i)) return KDTR_ENTRY;
        kdtr_decode_(entry, &t);
        if (flags || reserved)
            return kdtr_fail_(f->error, KDTR_ENTRY, t.name,
                              "has flags 0x%llx and reserved 0x%llx; expected zeros",
                              KDTR_U_(flags), KDTR_U_(reserved));
        if (kdtr_check_type_(&t, &needed, KDTR_ENTRY, f->error)) return KDTR_ENTRY;
        if (t.n_bytes != needed) {
            if (t.offset <= UINT64_MAX - t.n_bytes)
                snprintf(to, sizeof to, "%llu", KDTR_U_(t.offset + t.n_bytes));
            return kdtr_fail_(f->error, KDTR_ENTRY, t.name,
                              "spans bytes %llu..%s, but %s %s takes %llu" KDTR_CUT_,
                              KDTR_U_(t.offset), to, kdtr_print_(list, t.shape, t.ndim),
                              kdtr_dtype_name(t.dtype), KDTR_U_(needed));
        }
        if (kdtr_check_place_(f, &t, end)) return KDTR_ENTRY;
        end = t.offset + t.n_bytes;
    }
    if (end == f->n_bytes) return KDTR_OK;
    return kdtr_fail_(f->error, KDTR_ENTRY, NULL,
                      "the last tensor ends at byte %llu, the file at %llu; "
                      "expected no trailing bytes",
                      KDTR_U_(end), KDTR_U_(f->n_bytes));
}

/* Step 5. A gap is shorter than the alignment, so this reads little. */
static int kdtr_check_gap_(kdtr_file *f, uint64_t end, uint64_t start)
{
    for (uint64_t at = end; at < start; at++)
        if (f->bytes[at] != 0)
            return kdtr_fail_(f->error, KDTR_GAP, NULL,
                              "byte %llu is 0x%02x, in the gap %llu..%llu; expected zeros",
                              KDTR_U_(at), f->bytes[at], KDTR_U_(end), KDTR_U_(start));
    return KDTR_OK;
}

static int kdtr_validate_(kdtr_file *f)
{
    uint64_t end;
    kdtr_tensor t;
    size_t valid;
    int status;
    if (f->n_bytes == 0)
        return kdtr_fail_(f->error, KDTR_FILE, NULL, "the file is empty; expected a KDTR file");
    if ((status = kdtr_check_header_(f)) != 0) return status;
    end = f->meta_offset + f->meta_size;
    if (kdtr_expect_crc_(f->error, KDTR_CHECKSUM, "directory", kdtr_entry_(f, 0),
                         f->n_entries * kdtr_entry_size_, kdtr_load(f->bytes + 96, 4)) ||
        kdtr_expect_crc_(f->error, KDTR_CHECKSUM, "metadata", f->bytes + f->meta_offset,
                         f->meta_size, kdtr_load(f->bytes + 100, 4)))
        return KDTR_CHECKSUM;
    if (kdtr_check_directory_(f)) return KDTR_ENTRY;
    if (kdtr_check_gap_(f, end, f->data_offset)) return KDTR_GAP;
    end = f->data_offset;
    for (uint64_t i = 0; i < f->n_entries; i++) {
        kdtr_decode_(kdtr_entry_(f, i), &t);
        if (kdtr_check_gap_(f, end, t.offset)) return KDTR_GAP;
        end = t.offset + t.n_bytes;
    }
    valid = kdtr_utf8_(f->bytes + f->meta_offset, (size_t)f->meta_size);
    if (valid == f->meta_size) return KDTR_OK;
    return kdtr_fail_(f->error, KDTR_METADATA, NULL, "metadata is not UTF-8 at byte %llu",
                      KDTR_U_(valid));
}

/* Reading */

int kdtr_from_memory(kdtr_file *file, const void *bytes, size_t n_bytes)
{
    int status;
    memset(file, 0, sizeof *file);
    file->bytes = (const unsigned char *)bytes;
    file->n_bytes = n_bytes;
    status = kdtr_validate_(file);
    if (status) kdtr_close(file); /* nothing of a refused file is handed out */
    return file->status = status;
}

/* Step 1: all of the file, in file->block. */
static int kdtr_read_(kdtr_file *file, const char *path, unsigned char **bytes, size_t *n_bytes)
{
    char *error = file->error;
    unsigned char head[kdtr_header_size_];
    uint64_t size;
    FILE *stream;
#if KDTR_POSIX_
    struct stat about;
    if (stat(path, &about) != 0) /* before fopen, which would wait for a pipe's other end */
        return errno == ENOENT
                   ? kdtr_fail_(error, KDTR_FILE, NULL, "no such file; expected a KDTR file")
                   : kdtr_fail_(error, KDTR_FILE, NULL, "cannot be read: %s", strerror(errno));
    if (S_ISDIR(about.st_mode))
        return kdtr_fail_(error, KDTR_FILE, NULL, "is a directory; expected a KDTR file");
    if (!S_ISREG(about.st_mode))
        return kdtr_fail_(error, KDTR_FILE, NULL, "is not a regular file; expected a KDTR file");
#endif
    stream = fopen(path, "rb");
    if (stream == NULL)
        return kdtr_fail_(error, KDTR_FILE, NULL, "cannot be read: %s", strerror(errno));
#if KDTR_POSIX_
    size = (uint64_t)about.st_size;
#else
    size = fseek(stream, 0, SEEK_END) == 0 ? (uint64_t)ftell(stream) : UINT64_MAX;
    rewind(stream);
#endif
    /* the header before the memory: a foreign file is refused by its first bytes, however large */
    file->bytes = head;
    file->n_bytes = size;
    if (size > 0 && size != UINT64_MAX) {
        size_t n_head = size < sizeof head ? (size_t)size : sizeof head;
        int status = fread(head, 1, n_head, stream) == n_head ? kdtr_check_header_(file) : KDTR_OK;
        if (status != KDTR_OK) return fclose(stream), status;
    }
    rewind(stream);
    *n_bytes = (size_t)size;
    file->block = size < SIZE_MAX - kdtr_block_ ? malloc(*n_bytes + kdtr_block_) : NULL;
    if (file->block != NULL) {
        *bytes = (unsigned char *)file->block;
        *bytes += kdtr_block_ - (uintptr_t)*bytes % kdtr_block_;
        *n_bytes = fread(*bytes, 1, *n_bytes, stream);
    }
    fclose(stream);
    if (file->block != NULL && size == *n_bytes) return KDTR_OK;
    return kdtr_fail_(error, KDTR_FILE, NULL, "cannot be read: %s for its %llu bytes",
                      file->block ? "an error or an early end" : "no memory", KDTR_U_(size));
}

int kdtr_open(kdtr_file *file, const char *path)
{
    char text[KDTR_ERROR_SIZE];
    unsigned char *bytes = NULL;
    size_t n_bytes = 0;
    void *block;
    memset(file, 0, sizeof *file);
    file->status = kdtr_read_(file, path, &bytes, &n_bytes);
    block = file->block;
    if (file->status == KDTR_OK) kdtr_from_memory(file, bytes, n_bytes);
    file->block = block;
    if (file->status == KDTR_OK) return KDTR_OK;
    kdtr_close(file);
    memcpy(text, file->error, sizeof text);
    return kdtr_fail_(file->error, file->status, NULL, "%.300s: %s", path, text);
}

void kdtr_close(kdtr_file *file)
{
    free(file->block);
    file->block = NULL;
    file->bytes = NULL;
    file->n_bytes = file->n_entries = file->meta_offset = file->meta_size = file->data_offset = 0;
}

const char *kdtr_metadata(const kdtr_file *file, size_t *n_bytes)
{
    *n_bytes = (size_t)file->meta_size;
    return file->bytes ? (const char *)file->bytes + file->meta_offset : NULL;
}

int kdtr_at(kdtr_file *file, uint64_t i, kdtr_tensor *tensor)
{
    memset(tensor, 0, sizeof *tensor);
    if (i >= file->n_entries)
        return file->status =
                   kdtr_fail_(file->error, KDTR_UNKNOWN, NULL, "no tensor %llu among %llu",
                              KDTR_U_(i), KDTR_U_(file->n_entries));
    kdtr_decode_(kdtr_entry_(file, i), tensor);
    return KDTR_OK;
}

int kdtr_find(kdtr_file *file, const char *name, kdtr_tensor *tensor)
{
    uint64_t low = 0, high = file->n_entries;
    memset(tensor, 0, sizeof *tensor);
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        const int order = strcmp(name, (const char *)kdtr_entry_(file, middle)); /* it has a NUL */
        if (order == 0) return kdtr_at(file, middle, tensor);
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return file->status =
               kdtr_fail_(file->error, KDTR_UNKNOWN, NULL, "no tensor '%.300s' among %llu", name,
                          KDTR_U_(file->n_entries));
}

int kdtr_check(kdtr_file *file, kdtr_tensor *tensor)
{
    const kdtr_tensor t = *tensor;
    const unsigned char *p = file->bytes;
    uint32_t actual;
    tensor->data = NULL;
    if (p == NULL || t.n_bytes > file->n_bytes || t.offset > file->n_bytes - t.n_bytes)
        return file->status = kdtr_fail_(file->error, KDTR_UNKNOWN, t.name, "is not of this file");
    p += t.offset;
    actual = kdtr_crc32(p, (size_t)t.n_bytes);
    if (actual != t.crc)
        return file->status = kdtr_fail_(file->error, KDTR_PAYLOAD, t.name,
                                         "has checksum %08x, its %llu bytes at %llu give "
                                         "%08x" KDTR_CUT_,
                                         t.crc, KDTR_U_(t.n_bytes), KDTR_U_(t.offset), actual);
    if (kdtr_check_values_(&t, p, KDTR_PAYLOAD, file->error)) return file->status = KDTR_PAYLOAD;
    tensor->data = p;
    return KDTR_OK;
}

int kdtr_get(kdtr_file *file, const char *name, kdtr_tensor *tensor)
{
    const int status = kdtr_find(file, name, tensor);
    return status ? status : kdtr_check(file, tensor);
}

int kdtr_verify(kdtr_file *file)
{
    kdtr_tensor tensor;
    int status = KDTR_OK;
    for (uint64_t i = 0; i < file->n_entries && !status; i++)
        status = kdtr_at(file, i, &tensor) ? file->status : kdtr_check(file, &tensor);
    return status;
}

/* Writing */

kdtr_tensor kdtr_make(const char *name, uint32_t dtype, uint32_t ndim, const uint64_t *shape,
                      const void *data)
{
    kdtr_tensor t;
    memset(&t, 0, sizeof t);
    for (size_t i = 0; i < KDTR_NAME_SIZE && name[i]; i++) t.name[i] = name[i];
    t.dtype = dtype;
    t.ndim = ndim;
    for (uint32_t i = 0; i < ndim && i < KDTR_MAX_NDIM; i++) t.shape[i] = shape[i];
    t.data = data;
    return t;
}

static int kdtr_by_name_(const void *a, const void *b)
{
    return strcmp(((const kdtr_tensor *)a)->name, ((const kdtr_tensor *)b)->name);
}

/* Checks and sorts the tensors, and fills in offset, n_bytes and crc. end is the
   first payload's place, and becomes the file's size. */
static int kdtr_plan_(kdtr_tensor *tensors, size_t n, uint32_t alignment, uint64_t *end,
                      char *error)
{
    for (size_t i = 0; i < n; i++) { /* before the sort, which needs the NUL */
        const void *nul = memchr(tensors[i].name, 0, KDTR_NAME_SIZE);
        const size_t length = nul ? strlen(tensors[i].name) : 0;
        if (length == 0 || kdtr_utf8_((const unsigned char *)tensors[i].name, length) != length)
            return kdtr_fail_(error, KDTR_WRITE, tensors[i].name,
                              "has a name that cannot be stored; expected 1 to 95 bytes of UTF-8");
    }
    if (n > 1) qsort(tensors, n, sizeof *tensors, kdtr_by_name_);
    for (size_t i = 0; i < n; i++) {
        kdtr_tensor *t = &tensors[i];
        if (i > 0 && strcmp(t[-1].name, t->name) == 0)
            return kdtr_fail_(error, KDTR_WRITE, t->name, "is there twice; expected unique names");
        if (kdtr_check_type_(t, &t->n_bytes, KDTR_WRITE, error)) return KDTR_WRITE;
        if (t->n_bytes > SIZE_MAX || (t->n_bytes > 0 && t->data == NULL))
            return kdtr_fail_(error, KDTR_WRITE, t->name, "has no data; expected %llu bytes",
                              KDTR_U_(t->n_bytes));
        if (kdtr_check_values_(t, t->data, KDTR_WRITE, error)) return KDTR_WRITE;
        t->offset = t->n_bytes ? kdtr_round_up_(*end, alignment) : *end;
        t->crc = kdtr_crc32(t->data, (size_t)t->n_bytes);
        *end = t->offset + t->n_bytes;
    }
    return KDTR_OK;
}

/* Header and directory into head, which is zeroed but for the metadata at meta_offset. */
static void kdtr_encode_(unsigned char *head, const kdtr_tensor *tensors, size_t n,
                         size_t meta_size, uint32_t alignment, uint64_t file_size)
{
    const size_t dir_size = n * kdtr_entry_size_, meta_offset = kdtr_header_size_ + dir_size;
    for (size_t i = 0; i < n; i++) {
        unsigned char *entry = head + kdtr_header_size_ + i * kdtr_entry_size_;
        memcpy(entry, tensors[i].name, strlen(tensors[i].name));
        kdtr_store_(entry + 96, 2, tensors[i].dtype);
        kdtr_store_(entry + 98, 2, tensors[i].ndim);
        for (size_t k = 0; k < KDTR_MAX_NDIM; k++)
            kdtr_store_(entry + 104 + 8 * k, 8, tensors[i].shape[k]);
        kdtr_store_(entry + 168, 8, tensors[i].offset);
        kdtr_store_(entry + 176, 8, tensors[i].n_bytes);
        kdtr_store_(entry + 184, 4, tensors[i].crc);
    }
    memcpy(head, kdtr_magic_, sizeof kdtr_magic_);
    kdtr_store_(head + 8, 2, 1);
    kdtr_store_(head + 12, 4, kdtr_header_size_);
    kdtr_store_(head + 32, 8, n);
    kdtr_store_(head + 40, 8, kdtr_header_size_);
    kdtr_store_(head + 48, 8, dir_size);
    kdtr_store_(head + 56, 4, kdtr_entry_size_);
    kdtr_store_(head + 60, 4, alignment);
    kdtr_store_(head + 64, 8, meta_offset);
    kdtr_store_(head + 72, 8, meta_size);
    kdtr_store_(head + 80, 8, kdtr_round_up_(meta_offset + meta_size, alignment));
    kdtr_store_(head + 88, 8, file_size);
    kdtr_store_(head + 96, 4, kdtr_crc32(head + kdtr_header_size_, dir_size));
    kdtr_store_(head + 100, 4, kdtr_crc32(head + meta_offset, meta_size));
    kdtr_store_(head + 124, 4, kdtr_crc32(head, 124));
}

/* Make it survive a power cut; other hosts than POSIX ones have no portable way. */
static int kdtr_sync_(FILE *stream)
{
#if KDTR_POSIX_
    return fflush(stream) == 0 && fsync(fileno(stream)) == 0;
#else
    return fflush(stream) == 0;
#endif
}

static void kdtr_sync_folder_(char *path) /* of path, which is cut to it */
{
#if KDTR_POSIX_
    char *slash = strrchr(path, '/');
    int folder;
    if (slash) slash[1] = '\0';
    folder = open(slash ? path : ".", O_RDONLY);
    if (folder < 0) return; /* it is a hint: not every file system can */
    (void)fsync(folder);
    close(folder);
#else
    (void)path;
#endif
}

/* The file, in a sibling that then takes the place of path. sibling: room for its name. */
static int kdtr_replace_(const char *path, char *sibling, size_t sibling_size,
                         const unsigned char *head, uint64_t head_size, const kdtr_tensor *tensors,
                         size_t n, char *error)
{
    FILE *stream = NULL;
    uint64_t at = head_size;
    int failed = EEXIST;
    for (int number = 0; stream == NULL && failed == EEXIST && number < 1000; number++) {
        snprintf(sibling, sibling_size, "%s.%d.tmp", path, number);
        stream = fopen(sibling, "wbx"); /* x: not a file that exists, it is another writer's */
        failed = stream ? 0 : errno;
    }
    if (stream != NULL) {
        fwrite(head, 1, (size_t)head_size, stream);
        for (size_t i = 0; i < n; i++) {
            for (; at < tensors[i].offset; at++) putc(0, stream);
            if (tensors[i].n_bytes) fwrite(tensors[i].data, 1, (size_t)tensors[i].n_bytes, stream);
            at += tensors[i].n_bytes;
        }
        if (ferror(stream) || !kdtr_sync_(stream)) failed = errno ? errno : EIO;
        if (fclose(stream) != 0 && !failed) failed = errno;
#if !KDTR_POSIX_
        if (!failed) remove(path); /* there, rename may refuse to replace */
#endif
        if (!failed && rename(sibling, path) != 0) failed = errno;
        if (failed) remove(sibling);
    }
    if (failed)
        return kdtr_fail_(error, KDTR_WRITE, NULL, "%.300s: cannot be written: %s", path,
                          strerror(failed));
    kdtr_sync_folder_(sibling);
    return KDTR_OK;
}

int kdtr_write(const char *path, const kdtr_tensor *tensors, size_t n_tensors, const void *metadata,
               size_t meta_size, uint32_t alignment, char error[KDTR_ERROR_SIZE])
{
    const unsigned char *meta = (const unsigned char *)metadata;
    const size_t meta_offset = kdtr_header_size_ + n_tensors * kdtr_entry_size_;
    const size_t sibling_size = strlen(path) + 32;
    uint64_t data_offset, end;
    kdtr_tensor *sorted;
    unsigned char *head;
    char *sibling;
    int status;
    if (alignment < 64 || alignment > 65536 || (alignment & (alignment - 1)) != 0)
        return kdtr_fail_(error, KDTR_WRITE, NULL,
                          "alignment is %u; expected a power of two from 64 to 65536", alignment);
    if (meta_size > kdtr_max_meta_)
        return kdtr_fail_(error, KDTR_WRITE, NULL,
                          "metadata takes %llu bytes; at most 16777216 are stored",
                          KDTR_U_(meta_size));
    if (meta_size < 2 || meta[0] != '{' || meta[meta_size - 1] != '}' ||
        kdtr_utf8_(meta, meta_size) != meta_size)
        return kdtr_fail_(error, KDTR_WRITE, NULL,
                          "metadata of %llu bytes is not canonical JSON; expected {..} in UTF-8",
                          KDTR_U_(meta_size));
    /* no overflow: a kdtr_tensor is larger than an entry, and n_tensors of them are in memory */
    end = data_offset = kdtr_round_up_((uint64_t)meta_offset + meta_size, alignment);
    sorted = (kdtr_tensor *)malloc(n_tensors * sizeof *sorted + 1);
    head = (unsigned char *)calloc(1, (size_t)data_offset);
    sibling = (char *)malloc(sibling_size);
    if (sorted == NULL || head == NULL || sibling == NULL) {
        status = kdtr_fail_(error, KDTR_WRITE, NULL, "no memory for a directory of %llu tensors",
                            KDTR_U_(n_tensors));
    } else {
        if (n_tensors) memcpy(sorted, tensors, n_tensors * sizeof *sorted);
        memcpy(head + meta_offset, meta, meta_size);
        status = kdtr_plan_(sorted, n_tensors, alignment, &end, error);
    }
    if (!status) {
        kdtr_encode_(head, sorted, n_tensors, meta_size, alignment, end);
        status =
            kdtr_replace_(path, sibling, sibling_size, head, data_offset, sorted, n_tensors, error);
    }
    free(sibling);
    free(head);
    free(sorted);
    return status;
}

#endif /* KDTR_IMPLEMENTATION */
