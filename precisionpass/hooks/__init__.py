"""What is watched and bounded while a model runs: figures, monitors, alarms, clipping, escalation."""
