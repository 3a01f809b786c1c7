// An array that grows by pages: no growth copies what is there, so an append costs the same however long it is.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace quire {

template <class T, int kPageBits>
class Paged {
 public:
  T& operator[](int32_t i) { return pages_[static_cast<uint32_t>(i) >> kPageBits][i & kMask]; }
  const T& operator[](int32_t i) const { return pages_[static_cast<uint32_t>(i) >> kPageBits][i & kMask]; }

  int32_t size() const { return size_; }

  // The index of a new element, a copy of `value`.
  int32_t append(const T& value) {
    if ((size_ & kMask) == 0) pages_.emplace_back(new T[kMask + 1]);
    (*this)[size_] = value;
    return size_++;
  }

  int64_t num_bytes() const {
    return static_cast<int64_t>(pages_.size()) * static_cast<int64_t>((kMask + 1) * sizeof(T)) +
           static_cast<int64_t>(pages_.capacity() * sizeof(pages_[0]));
  }

 private:
  static constexpr int32_t kMask = (1 << kPageBits) - 1;
  std::vector<std::unique_ptr<T[]>> pages_;
  int32_t size_ = 0;
};

}  // namespace quire
