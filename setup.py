# SPDX-License-Identifier: Apache-2.0
"""Drives CMake once and names the wheel; CMakeLists.txt is the build description.

torch is no build requirement on purpose: an isolated build would compile against
the newest torch and then run on yours. Install torch first, then
``pip install --no-build-isolation .``
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

try:
    import torch
except ImportError:
    sys.exit(
        "torch_sm3: expected an installed torch, but found none; type: pip install "
        "torch, and then: pip install --no-build-isolation ."
    )

ROOT = Path(__file__).resolve().parent
TORCH = ".".join(torch.__version__.split(".")[:2])
CUDA = torch.version.cuda


def base_version() -> str:
    """Return the version that CMakeLists.txt declares."""
    text = (ROOT / "CMakeLists.txt").read_text()
    match = re.search(r"project\(torch_sm3 VERSION ([0-9.]+)", text)
    assert match, "CMakeLists.txt declares project(torch_sm3 VERSION ...)"
    return match.group(1)


def variant() -> str:
    """Return the local version: the torch minor and CUDA, or cpu."""
    return f"pt{TORCH}{'cu' + CUDA if CUDA else 'cpu'}".replace(".", "")


def build_dir() -> Path:
    """Return the build folder, one for each torch and CUDA."""
    name = f"torch{TORCH}-{'cu' + CUDA if CUDA else 'cpu'}"
    return Path(os.environ.get("TORCH_SM3_BUILD_DIR", ROOT / "build" / name))


if sys.argv[1:] == ["--build-dir"]:
    # For the Makefile: the name of the build folder is made up here and nowhere else.
    print(build_dir())
    sys.exit()


class CMakeBuild(build_ext):
    """Configures, builds and installs the one library into the package."""

    def run(self) -> None:
        """Run CMake into ``torch_sm3/`` (editable) or the wheel's folder."""
        prefix = ROOT / "torch_sm3"
        environment = dict(os.environ)
        if not (self.inplace or self.editable_mode):
            prefix = Path(self.build_lib).resolve() / "torch_sm3"
            # For cmake/TorchSM3Install.cmake: no folder of this machine in a wheel.
            environment["TORCH_SM3_WHEEL"] = "1"
        build = build_dir()
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        build_type = "Debug" if os.environ.get("DEBUG") == "1" else "Release"
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            # A folder of this name may remember the torch of another environment.
            "-UTORCH_SM3_TORCH_CONFIG",
            f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
            f"-DCMAKE_BUILD_TYPE={build_type}",
        ]
        if not (build / "CMakeCache.txt").exists():
            configure += ["-G", "Ninja"]
        configure += os.environ.get("TORCH_SM3_CMAKE_ARGS", "").split()
        try:
            subprocess.check_call(configure)
            subprocess.check_call(["cmake", "--build", str(build), "-j", jobs])
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(
                f"torch_sm3: the build failed ({error}); it needs cmake >= 3.25, ninja "
                "and g++ >= 12 on PATH; if the compiler was killed, memory ran out: "
                "set MAX_JOBS=1"
            )
        subprocess.check_call(
            ["cmake", "--install", str(build), "--prefix", str(prefix)],
            env=environment,
        )

    def get_outputs(self) -> list[str]:
        """Return nothing: CMake's files travel as the package's own."""
        return []


class Wheel(bdist_wheel):
    """Names a wheel that holds a library but no CPython extension."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return ``py3-none-<platform>``."""
        return "py3", "none", super().get_tag()[2]


setup(
    version=f"{base_version()}+{variant()}",
    install_requires=[f"torch=={TORCH}.*"],
    # One stand-in extension, so that setuptools runs CMakeBuild exactly once.
    ext_modules=[Extension("torch_sm3.libtorch_sm3", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
)
