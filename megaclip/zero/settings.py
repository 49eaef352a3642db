"""DeepSpeed's own models of the sections of ds_config.json, which check their values, and its monitors."""

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, DeepSpeedMonitorConfig, TensorBoardConfig, WandbConfig
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
