// Checks at the op boundary, before anything is written. Every failure is one line that names op,
// argument, what was expected and what was given, and becomes a ValueError.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "core/params.h"
#include "ops/signatures.h"
#include "ops/torch_abi.h"

namespace flash_csa::ops {

class Check {
  public:
    explicit Check(const char* op);

    // Checks `t` against the row of the signature table with this label, and binds its symbols.
    // An absent optional passes.
    void operator()(const char* label, const Tensor& t);
    void operator()(const char* label, const OptTensor& t) {
        if (t.has_value()) (*this)(label, *t);
    }
    // Gives a symbol its value before the tensors that use it are checked.
    void bind(std::string_view symbol, int64_t value);
    // The value of a symbol, 0 when no checked tensor had it.
    int64_t operator[](std::string_view symbol) const;

    [[noreturn]] void fail(const std::string& what) const;
    void require(bool ok, const std::string& what) const {
        if (!ok) fail(what);
    }
    // `argument` must be one of the values.
    void one_of(const char* argument, int64_t got, std::initializer_list<int64_t> values) const;
    void in_range(const std::string& argument, int64_t got, int64_t low, int64_t high) const;
    // `argument` must be a number that is finite as FP32, not negative.
    void not_negative(const char* argument, double got) const;
    void workspace(const OptTensor& t, int64_t needed) const;
    // Checks a section of a schedule, which is at least as long as one of a single worker.
    void schedule(const Tensor& t, int64_t rows);
    // `id` must be that of a record that `allowed` lists.
    RecordId record_id(const std::string& argument, int64_t id,
                       std::initializer_list<RecordId> allowed) const;

    // Checks a page buffer, in a stated format that `allowed` lists.
    Pages pages(const char* label, const Tensor& t, int64_t record, int64_t page_size,
                std::initializer_list<RecordId> allowed);

    const char* op() const { return op_->op; }
    bool is_cuda() const { return cuda_; }
    int32_t device() const { return device_; }

  private:
    struct Symbol {
        std::string_view name;
        int64_t value;
    };
    const ArgSignature& find(const char* label);
    bool match_shape(const char* shape, const Tensor& t);
    std::string expected_shape(const char* shape, const Tensor* t) const;
    const Symbol* lookup(std::string_view name) const;
    void check_layout(const ArgSignature& arg, const Tensor& t) const;
    void check_alignment(const char* label, const Tensor& t, int64_t align) const;

    const OpSignature* op_;
    int32_t next_ = 0;  // row of the signature table behind the last one found
    std::vector<Symbol> symbols_;
    bool any_ = false;
    bool cuda_ = false;
    int32_t device_ = -1;
};

// As messages show it: std::to_string gives all digits of 1e300, and none of 1e-9.
std::string number(double x);

inline bool has_dtype(const Tensor& t, ScalarType dtype) { return t.scalar_type() == dtype; }

// Typed views of checked tensors; an absent optional gives null.
template <class T>
T* ptr(const Tensor& t) {
    return static_cast<T*>(t.data_ptr());
}
template <class T>
T* ptr(const OptTensor& t) {
    return t.has_value() ? ptr<T>(*t) : nullptr;
}
template <class T>
Matrix<T> matrix(const Tensor& t) {
    return {ptr<T>(t), t.stride(0)};
}
template <class T>
Matrix<T> matrix(const OptTensor& t) {
    return t.has_value() ? matrix<T>(*t) : Matrix<T>{};
}
template <class T>
Heads<T> heads(const Tensor& t) {
    return {ptr<T>(t), t.stride(0), t.stride(1)};
}

inline CosSin cos_sin(const Tensor& t) { return {ptr<const float>(t), t.size(0)}; }
inline BlockTable block_table(const Tensor& t) {
    return {ptr<const int32_t>(t), t.stride(0), static_cast<int32_t>(t.size(0)),
            static_cast<int32_t>(t.size(1))};
}
inline ConstPages const_pages(const Pages& p) {
    return {p.data, p.page_stride, p.num_pages, p.page_size, p.record};
}
inline ScheduleView schedule_view(const Tensor& t) {
    return {ptr<const int32_t>(t), static_cast<int32_t>(t.size(0))};
}
inline Workspace workspace_view(const OptTensor& t) {
    return t.has_value() ? Workspace{ptr<uint8_t>(*t), t->numel()} : Workspace{};
}

// Checks the five tensors of a Batch and gives their view.
BatchView batch_view(Check& check, const Tensor& positions, const Tensor& row_request,
                     const Tensor& cu_tokens, const Tensor& start, const Tensor& tail_slot,
                     int64_t max_rows);

}  // namespace flash_csa::ops
