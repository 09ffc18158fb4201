// engine.hpp: what this engine is, and its two ways of being judged.
#pragma once

#include <string>

#include "json.hpp"

json::Object engine_info(); // the fields of a `hello` reply (docs/stdio-protocol.md)

int serve();                                                             // stdio.cpp
int answer(const std::string &questions, const std::string &result);    // offline.cpp
