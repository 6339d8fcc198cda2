"""What networks, disks and crashes do to real daemons."""
