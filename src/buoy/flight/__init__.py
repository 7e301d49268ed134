"""The flight recorder's parts: the beacon, the log, the samples, the alarms, the evidence at death."""
