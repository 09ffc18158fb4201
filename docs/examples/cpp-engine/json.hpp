// json.hpp: the JSON of the stdio protocol: integers, texts, true, false, null, lists, objects.
//
// Strict: a float, a key twice, a number past 64 bits, anything after the value are errors. What
// it writes is canonical (keys sorted, no spaces), as a KDTR file's metadata has to be.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace json {

struct Value;
using List = std::vector<Value>;
using Object = std::map<std::string, Value>; // sorted by bytes, which is by code point
using Any = std::variant<std::nullptr_t, bool, std::int64_t, std::string, List, Object>;

struct Value : Any {
    using Any::Any;

    template <class T>
    const T &as(const std::string &what) const
    {
        if (const T *found = std::get_if<T>(this)) return *found;
        throw std::runtime_error(what + " has another type than the protocol's");
    }
    bool is_null() const { return std::holds_alternative<std::nullptr_t>(*this); }
};

inline Value number(std::int64_t value) { return Value(value); }
inline Value text(std::string value) { return Value(std::move(value)); }
inline Value flag(bool value) { return Value(value); }
inline Value numbers(const std::vector<std::int64_t> &values)
{
    return Value(List(values.begin(), values.end()));
}
inline Value texts(const std::vector<std::string> &values)
{
    return Value(List(values.begin(), values.end()));
}

class Parser {
public:
    explicit Parser(const std::string &line) : s_(line) {}

    Value parse()
    {
        Value value = any(0);
        skip();
        if (at_ != s_.size()) fail("expected the end of the line");
        return value;
    }

private:
    static constexpr int kMaxDepth = 16;

    [[noreturn]] void fail(const std::string &why) const
    {
        throw std::runtime_error("no JSON: " + why + " at byte " + std::to_string(at_));
    }
    char peek() const { return at_ < s_.size() ? s_[at_] : '\0'; }
    void skip()
    {
        while (peek() == ' ' || peek() == '\t' || peek() == '\r' || peek() == '\n') at_++;
    }
    bool take(char c)
    {
        skip();
        if (peek() != c || at_ == s_.size()) return false;
        at_++;
        return true;
    }
    void need(char c)
    {
        if (!take(c)) fail(std::string("expected ") + c);
    }

    Value any(int depth)
    {
        if (depth > kMaxDepth) fail("nested too deep");
        skip();
        switch (peek()) {
        case '{': return object(depth);
        case '[': return list(depth);
        case '"': return text(string());
        case 't': return word("true", flag(true));
        case 'f': return word("false", flag(false));
        case 'n': return word("null", Value(nullptr));
        default: return integer();
        }
    }

    Value word(const char *name, Value value)
    {
        const std::string wanted(name);
        if (s_.compare(at_, wanted.size(), wanted) != 0) fail("expected " + wanted);
        at_ += wanted.size();
        return value;
    }

    Value integer()
    {
        const std::size_t start = at_;
        if (peek() == '-') at_++;
        const std::size_t digits = at_;
        while (peek() >= '0' && peek() <= '9') at_++;
        if (at_ == digits) fail("expected a value");
        if (s_[digits] == '0' && at_ > digits + 1) fail("a number with a leading zero");
        if (peek() == '.' || peek() == 'e' || peek() == 'E') fail("no float is in the protocol");
        try {
            return number(std::stoll(s_.substr(start, at_ - start)));
        } catch (const std::out_of_range &) {
            fail("a number past 64 bits");
        }
    }

    Value list(int depth)
    {
        List values;
        need('[');
        if (take(']')) return Value(values);
        do values.push_back(any(depth + 1));
        while (take(','));
        need(']');
        return Value(values);
    }

    Value object(int depth)
    {
        Object fields;
        need('{');
        if (take('}')) return Value(fields);
        do {
            skip();
            std::string name = string();
            need(':');
            if (!fields.emplace(name, any(depth + 1)).second) fail("'" + name + "' is there twice");
        } while (take(','));
        need('}');
        return Value(fields);
    }

    std::string string()
    {
        std::string out;
        if (peek() != '"') fail("expected a text");
        for (at_++; peek() != '"'; at_++) {
            const auto c = static_cast<unsigned char>(peek());
            if (c < 0x20) fail("a control character, or the end, within a text");
            if (c == '\\')
                escape(out);
            else
                out += static_cast<char>(c);
        }
        at_++;
        return out;
    }

    void escape(std::string &out) // at_ is left at its last character
    {
        static const std::string from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
        at_++;
        if (peek() == 'u') {
            std::uint32_t code = hex4();
            if (code >= 0xd800 && code < 0xdc00 && s_.compare(at_ + 1, 2, "\\u") == 0) {
                at_ += 2;
                const std::uint32_t low = hex4();
                if (low < 0xdc00 || low > 0xdfff) fail("half a surrogate pair");
                code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
            }
            if (code >= 0xd800 && code < 0xe000) fail("half a surrogate pair");
            return utf8(out, code);
        }
        const std::size_t which = peek() ? from.find(peek()) : std::string::npos;
        if (which == std::string::npos) fail("an unknown escape");
        out += to[which];
    }

    std::uint32_t hex4() // at_ is at the u, and is left at the last digit
    {
        std::uint32_t code = 0;
        for (int i = 0; i < 4; i++) {
            at_++;
            const char c = peek();
            const int digit = c >= '0' && c <= '9'   ? c - '0'
                              : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                     : -1;
            if (digit < 0) fail("expected four hex digits");
            code = code << 4 | static_cast<std::uint32_t>(digit);
        }
        return code;
    }

    static void utf8(std::string &out, std::uint32_t code)
    {
        const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        static const unsigned lead[] = {0x00, 0xc0, 0xe0, 0xf0};
        out += static_cast<char>(lead[more] | code >> 6 * more);
        for (int i = more - 1; i >= 0; i--) out += static_cast<char>(0x80 | (code >> 6 * i & 0x3f));
    }

    const std::string &s_;
    std::size_t at_ = 0;
};

inline Value parse(const std::string &line) { return Parser(line).parse(); }

inline std::string quoted(const std::string &text)
{
    std::string out = "\"";
    char code[7];
    for (const char c : text) {
        const std::size_t which = std::string("\"\\\n\r\t\b\f").find(c);
        if (which != std::string::npos && c) {
            out += '\\';
            out += "\"\\nrtbf"[which];
        } else if (static_cast<unsigned char>(c) < 0x20) {
            std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
            out += code;
        } else {
            out += c;
        }
    }
    return out + '"';
}

inline std::string dump(const Value &value)
{
    std::string out;
    if (const auto *text = std::get_if<std::string>(&value)) return quoted(*text);
    if (const auto *number = std::get_if<std::int64_t>(&value)) return std::to_string(*number);
    if (const auto *flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
    if (const auto *list = std::get_if<List>(&value)) {
        for (const Value &item : *list) out += (out.empty() ? "" : ",") + dump(item);
        return "[" + out + "]";
    }
    if (const auto *object = std::get_if<Object>(&value)) {
        for (const auto &[name, item] : *object)
            out += (out.empty() ? "" : ",") + quoted(name) + ":" + dump(item);
        return "{" + out + "}";
    }
    return "null";
}

} // namespace json
