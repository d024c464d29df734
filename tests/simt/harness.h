// A small frame for the CPU machine's own tests: TEST(name) { ... } registers a test, and main()
// runs them all, each in this process, and says "name: ok" or what went wrong.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

#define TEST(name)                                       \
  static void test_##name();                             \
  static Registration register_##name(#name, &test_##name); \
  static void test_##name()

inline void fail_check(const char* expression, int line, double got, double want) {
  char text[300];
  snprintf(text, sizeof text, "line %d: %s: got %.9g, want %.9g", line, expression, got, want);
  throw std::runtime_error(text);
}

#define EQUAL(got, want)                                                            \
  do {                                                                              \
    const auto got_ = (got);                                                        \
    const auto want_ = (want);                                                      \
    if (!(got_ == want_))                                                           \
      fail_check(#got, __LINE__, static_cast<double>(got_), static_cast<double>(want_)); \
  } while (0)
#define NEAR(got, want, tolerance)                                                  \
  do {                                                                              \
    const double got_ = static_cast<double>(got), want_ = static_cast<double>(want); \
    if (!(std::fabs(got_ - want_) <= (tolerance))) fail_check(#got, __LINE__, got_, want_); \
  } while (0)

// Raises what the machine has to say about the last launches.
inline void no_error() {
  const cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}

// An array that kernels can use, of the host's making.
template <class T>
struct Array {
  T* p = nullptr;
  size_t n;
  explicit Array(size_t size, T value = T()) : n(size) {
    cudaMalloc(&p, n * sizeof(T));
    for (size_t i = 0; i < n; i++) p[i] = value;
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(p); }
  T& operator[](size_t i) { return p[i]; }
  operator T*() { return p; }
};

int main(int argc, char** argv) {
  for (const Test& t : tests()) {
    if (argc > 1 && strcmp(argv[1], t.name) != 0) continue;
    std::string result = "ok";
    try {
      t.run();
      no_error();
    } catch (const std::exception& e) {
      result = e.what();
      if (const cudaError_t also = cudaGetLastError()) {
        result += std::string("\n") + cudaGetErrorString(also);
      }
    }
    printf("== %s: %s\n", t.name, result.c_str());
    fflush(stdout);
  }
}
