"""The commands of ``taskqueue``, one file for each command or group."""
