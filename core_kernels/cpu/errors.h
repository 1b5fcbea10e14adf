// The error of a value that breaks an op's contract.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mxep {

// Throws std::invalid_argument "op: argument: got X at index i; allowed: ...".
[[noreturn]] inline void bad_value(const char* op, const char* argument, int64_t got, int64_t index,
                                   const std::string& allowed) {
  throw std::invalid_argument(std::string(op) + ": " + argument + ": got " + std::to_string(got) + " at index " +
                              std::to_string(index) + "; allowed: " + allowed);
}

}  // namespace mxep
