"""Algorithms turn rewards into advantages: one pure file each, with its equation and paper."""
