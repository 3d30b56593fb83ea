// Precompiled header of every folder but pjrt/ and python/: torch's headers, parsed once instead of once a
// file.
//
// CMake includes it before each file. That is speed only (2 s a file instead of 13): a file still includes
// what it uses. Put here what is large, never changes and serves several files; nothing of ours, and nothing
// of Python, whose headers make each file pay 5 s more (python/pch.h has them).
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>
