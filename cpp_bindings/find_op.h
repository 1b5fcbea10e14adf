// The entry of an op table by its name.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace mxep {

// Throws std::invalid_argument with all names of the table if none is `name`; `caller` begins the message.
template <typename Entry>
const Entry& find_op(std::span<const Entry> table, const char* caller, std::string_view name) {
  std::string known;
  for (const Entry& op : table) {
    if (name == op.name) return op;
    known += std::string(known.empty() ? "" : ", ") + op.name;
  }
  throw std::invalid_argument(std::string(caller) + ": name: got '" + std::string(name) + "'; allowed: " + known);
}

}  // namespace mxep
