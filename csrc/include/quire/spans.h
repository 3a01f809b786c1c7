// Ranges of memory that a kernel reads or writes, to refuse calls that would write what they read.
#pragma once

#include "quire/types.h"

namespace quire {

struct Span {
  Span(const void* data, int64_t bytes) : begin(static_cast<const char*>(data)), end(begin + max_i64(0, bytes)) {}
  const char *begin, *end;
};

// Of `rows` rows of `size` elements; rows are `stride` elements apart. Nothing where `data` is null.
inline Span span_of(const void* data, int64_t rows, int64_t stride, int64_t size, int64_t element_bytes) {
  return {data, rows > 0 && data != nullptr ? ((rows - 1) * stride + size) * element_bytes : 0};
}

template <class... Spans>
bool overlaps_any(const Span& written, const Spans&... others) {
  return ((written.begin < others.end && others.begin < written.end) || ...);
}

constexpr char kOverlap[] = "a tensor that is written shares memory with another one";

}  // namespace quire
