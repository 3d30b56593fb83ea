// Precompiled header of the bindings: torch's headers with Python's and pybind11's. See csrc/pch.h.
//
// Not <torch/extension.h>: it adds torch::nn and the rest of the C++ frontend, twice the time and 200 MB.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <vector>
