"""Devices that are not there."""
