"""Measure the engine on real processes: against torch's own schedules and against the bubble-free bound."""
