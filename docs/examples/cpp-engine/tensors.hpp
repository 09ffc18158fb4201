// tensors.hpp: reading and writing KDTR files through kdtr.h, as C++ values.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kdtr.h"
#include "refusal.hpp"

using Shape = std::vector<std::uint64_t>;
using Ids = std::vector<std::int64_t>;      // tokens, parents, positions, nodes
using Bits = std::vector<std::uint8_t>;     // bools, one a byte: what KDTR stores

inline std::string shown(const Shape &shape)
{
    std::string out;
    for (const auto n : shape) out += (out.empty() ? "" : ", ") + std::to_string(n);
    return "[" + out + "]";
}

// A tensor of a file. Elements are taken with kdtr_load: right on any host, at any alignment.
struct Tensor {
    kdtr_tensor raw;

    Shape shape() const { return Shape(raw.shape, raw.shape + raw.ndim); }
    std::uint64_t size() const { return kdtr_elements(&raw); }
    std::string about() const { return say(kdtr_dtype_name(raw.dtype), " ", shown(shape())); }
    bool is_floating() const { return raw.dtype >= KDTR_F64 && raw.dtype <= KDTR_BF16; }
    bool is_integer() const
    {
        return raw.dtype >= KDTR_I64 && raw.dtype <= KDTR_U8 && raw.dtype != KDTR_I4X2;
    }

    double number(std::uint64_t i) const // f64, f32, f16, bf16
    {
        const std::uint64_t bits = load(i);
        if (raw.dtype == KDTR_F64) return from_bits<double>(bits);
        if (raw.dtype == KDTR_F32) return from_bits<float>(static_cast<std::uint32_t>(bits));
        if (raw.dtype == KDTR_BF16) return from_bits<float>(static_cast<std::uint32_t>(bits << 16));
        const auto exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
        const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                           : std::ldexp(fraction, -24);
        return bits >> 15 ? -size : size;
    }

    std::int64_t integer(std::uint64_t i) const // sign-extended; a u64 past 2^63 is refused
    {
        const std::uint64_t bits = load(i), width = kdtr_dtype_bits(raw.dtype);
        const bool is_signed = raw.dtype == KDTR_I64 || raw.dtype == KDTR_I32 || raw.dtype == KDTR_I8;
        if (!is_signed && width == 64 && bits >> 63)
            throw Refusal("InputError", say(raw.name, " holds ", bits, "; expected 64 bits, signed"));
        const std::uint64_t sign = is_signed && width < 64 && bits >> (width - 1) ? ~0ull << width : 0;
        return static_cast<std::int64_t>(bits | sign);
    }

private:
    std::uint64_t load(std::uint64_t i) const
    {
        const std::size_t size = kdtr_dtype_bits(raw.dtype) / 8;
        return kdtr_load(static_cast<const char *>(raw.data) + i * size, size);
    }
    template <class To, class From>
    static To from_bits(From bits)
    {
        static_assert(sizeof(To) == sizeof(From), "the same bits");
        To value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

// An open file. `kind` is the class in which it refuses: BundleError for models, InputError for
// what a request brings along.
class Reader {
public:
    Reader(const std::string &path, const char *kind) : kind_(kind)
    {
        if (kdtr_open(&file_, path.c_str())) throw Refusal(kind_, file_.error); // with the path
    }
    ~Reader() { kdtr_close(&file_); }
    Reader(const Reader &) = delete;
    Reader &operator=(const Reader &) = delete;

    bool has(const std::string &name)
    {
        kdtr_tensor found;
        return kdtr_find(&file_, name.c_str(), &found) == KDTR_OK;
    }
    Tensor get(const std::string &name) // the payload is checked at each call
    {
        Tensor found;
        if (kdtr_get(&file_, name.c_str(), &found.raw)) throw Refusal(kind_, file_.error);
        return found;
    }
    std::vector<std::string> names(const std::string &prefix)
    {
        std::vector<std::string> found;
        kdtr_tensor tensor;
        for (std::uint64_t i = 0; i < file_.n_entries; i++)
            if (!kdtr_at(&file_, i, &tensor) && !std::strncmp(tensor.name, prefix.c_str(), prefix.size()))
                found.push_back(tensor.name);
        return found;
    }

    std::int64_t integer(const std::string &name) { return only(name, KDTR_I64, 0).integer(0); }
    bool flag(const std::string &name) { return only(name, KDTR_BOOL, 0).integer(0) != 0; }
    double number(const std::string &name) { return only(name, KDTR_F64, 0).number(0); }
    Ids integers(const std::string &name)
    {
        const Tensor found = only(name, KDTR_I64, 1);
        Ids values(found.size());
        for (std::size_t i = 0; i < values.size(); i++) values[i] = found.integer(i);
        return values;
    }

private:
    Tensor only(const std::string &name, std::uint32_t dtype, std::uint32_t ndim)
    {
        const Tensor found = get(name);
        if (found.raw.dtype != dtype || found.raw.ndim != ndim)
            throw Refusal(kind_, say(name, " is ", found.about(), "; expected ",
                                     kdtr_dtype_name(dtype), ndim ? " [n]" : " []"));
        return found;
    }

    kdtr_file file_;
    const char *kind_;
};

// Tensors to be written as one file. Host order is taken for little-endian: swap here if yours is not.
class Writer {
public:
    void add(const std::string &name, const Shape &shape, const std::vector<float> &values)
    {
        keep(name, KDTR_F32, shape, values.data(), values.size() * sizeof(float));
    }
    void add(const std::string &name, const Shape &shape, const Ids &values)
    {
        keep(name, KDTR_I64, shape, values.data(), values.size() * sizeof(std::int64_t));
    }
    void add(const std::string &name, const Shape &shape, const Bits &values)
    {
        keep(name, KDTR_BOOL, shape, values.data(), values.size());
    }
    void add_bytes(const std::string &name, const std::string &bytes)
    {
        keep(name, KDTR_U8, {bytes.size()}, bytes.data(), bytes.size());
    }

    bool empty() const { return kept_.empty(); }

    void write(const std::string &path, const std::string &metadata = "{}") const
    {
        std::vector<kdtr_tensor> tensors;
        for (const Kept &one : kept_)
            tensors.push_back(kdtr_make(one.name.c_str(), one.dtype,
                                        static_cast<std::uint32_t>(one.shape.size()),
                                        one.shape.data(), one.bytes.data()));
        char error[KDTR_ERROR_SIZE];
        if (kdtr_write(path.c_str(), tensors.data(), tensors.size(), metadata.data(),
                       metadata.size(), KDTR_DEFAULT_ALIGNMENT, error))
            throw std::runtime_error(error);
    }

private:
    struct Kept {
        std::string name;
        std::uint32_t dtype;
        Shape shape;
        std::vector<char> bytes;
    };
    void keep(const std::string &name, std::uint32_t dtype, const Shape &shape, const void *data,
              std::size_t n_bytes)
    {
        const char *from = static_cast<const char *>(data);
        kept_.push_back({name, dtype, shape, std::vector<char>(from, from + n_bytes)});
    }
    std::vector<Kept> kept_;
};

// Where the stages of a forward go (contract/stages.py); without `out` nothing is written, and a
// forward may skip the work of observing. layer -1: a stage that is not per layer.
//
// CUDA: copy to the host here, after the stream has done what comes before.
struct Trace {
    Writer *out = nullptr;
    std::function<std::string(const std::string &stage, int layer)> name;

    template <class T>
    void operator()(const char *stage, int layer, const Shape &shape, const T &values) const
    {
        if (out) out->add(name(stage, layer), shape, values);
    }
};
