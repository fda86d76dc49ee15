# A C and a C++ compiler and the right architecture, or a clear word about it.

find_package(Python 3.10 COMPONENTS Interpreter)
if(NOT Python_FOUND)
    knapspec_edge_fail("Python 3.10 or newer was not found; pass -DPython_EXECUTABLE=/path/to/python3.")
endif()

option(KNAPSPEC_EDGE_ALLOW_ROSETTA "Build for x86_64 although this machine is an Apple Silicon Mac" OFF)
if(APPLE AND NOT KNAPSPEC_EDGE_ALLOW_ROSETTA AND NOT CMAKE_OSX_ARCHITECTURES MATCHES "arm64")
    execute_process(
        COMMAND "${Python_EXECUTABLE}" -c "import platform; print(platform.machine())"
        OUTPUT_VARIABLE KNAPSPEC_EDGE_PYTHON_MACHINE
        OUTPUT_STRIP_TRAILING_WHITESPACE)
    execute_process(
        COMMAND sysctl -n hw.optional.arm64
        OUTPUT_VARIABLE KNAPSPEC_EDGE_HAS_ARM64
        OUTPUT_STRIP_TRAILING_WHITESPACE
        ERROR_QUIET)
    if(KNAPSPEC_EDGE_HAS_ARM64 STREQUAL "1" AND NOT KNAPSPEC_EDGE_PYTHON_MACHINE STREQUAL "arm64")
        knapspec_edge_fail("this Python (${Python_EXECUTABLE}) is an ${KNAPSPEC_EDGE_PYTHON_MACHINE} program that runs emulated on Apple Silicon: without Metal and several times slower. Install an arm64 Python, make the environment with it, and try again. To build for x86_64 all the same, set CMAKE_ARGS=-DKNAPSPEC_EDGE_ALLOW_ROSETTA=ON.")
    endif()
endif()

if(APPLE)
    set(KNAPSPEC_EDGE_COMPILER_HINT "Run `xcode-select --install`.")
elseif(WIN32)
    set(KNAPSPEC_EDGE_COMPILER_HINT "Install the Visual Studio Build Tools with `Desktop development with C++`.")
else()
    set(KNAPSPEC_EDGE_COMPILER_HINT "On Debian and Ubuntu: `sudo apt install g++`; on Fedora: `sudo dnf install gcc-c++`.")
endif()

include(CheckLanguage)
foreach(language IN ITEMS C CXX)
    if(NOT CMAKE_${language}_COMPILER)
        check_language(${language})
    endif()
    if(NOT CMAKE_${language}_COMPILER)
        set(name ${language})
        if(language STREQUAL "CXX")
            set(name "C++")
        endif()
        knapspec_edge_fail("no working ${name} compiler was found, and llama.cpp is compiled on this machine. ${KNAPSPEC_EDGE_COMPILER_HINT}")
    endif()
endforeach()
enable_language(C)
enable_language(CXX)

get_property(KNAPSPEC_EDGE_MULTI_CONFIG GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT KNAPSPEC_EDGE_MULTI_CONFIG AND NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
