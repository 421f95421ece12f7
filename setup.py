"""The packages of the wheel: the checkout's top-level folders become folders of `retrain`."""

from setuptools import find_namespace_packages, setup

INSIDE = ("configs", "data", "environments", "rewards")

setup(
    packages=[
        *find_namespace_packages(include=["retrain*"]),
        *(f"retrain.{folder}" for folder in INSIDE),
    ],
    package_dir={f"retrain.{folder}": folder for folder in INSIDE},
    package_data={
        "retrain": ["py.typed", "__init__.pyi", "report/*.html"],
        "retrain.configs": ["*.yaml", "agents/*.py", "tools/*.py", "cookbook/*.*"],
        "retrain.data": ["*.jsonl", "*.sql"],
    },
)
