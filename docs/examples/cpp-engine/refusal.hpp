// refusal.hpp: an error with the class that the judge knows it by (contract/errors.py).
//
// A refusal is the caller's mistake: it is thrown before anything has changed. What breaks inside
// (no memory, a device error) is any other exception, and is told as one.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

struct Refusal : std::runtime_error {
    // kind: TreeError, InputError, CacheError, SessionError; in load ConfigError, CheckpointError,
    // BundleError, UnsupportedError
    Refusal(const char *name, const std::string &text) : std::runtime_error(text), kind(name) {}
    const char *kind;
};

// The parts as one text: say("needs ", n, " slots").
template <class... Parts>
std::string say(const Parts &...parts)
{
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}
