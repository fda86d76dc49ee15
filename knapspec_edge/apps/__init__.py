"""What the commands do: functions from inputs to events. Nothing here prints or parses options."""
