"""Machines for the doctor: trees of files, equivalent to what deployment tools write."""
