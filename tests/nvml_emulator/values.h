/* Every value that a script can give for a GPU or a MIG instance: identifier, name, kind. A new value is one line here. */
#ifndef WARPWATCH_NVML_VALUES_H
#define WARPWATCH_NVML_VALUES_H

/* How a value goes on between two points of the script, and what a reload of the driver does to it.
 *
 *     GAUGE    holds from point to point
 *     COUNTER  counts on a straight line from point to point, and on in its last slope; 0 at a reload
 *     STEPS    holds from point to point, counts on from round to round of a script that loops; 0 at a reload */
enum value_kind { GAUGE, COUNTER, STEPS };

#define VALUES(X)                                                                                                      \
    X(UTILIZATION_GPU, "utilization_gpu_percent", GAUGE)                                                               \
    X(UTILIZATION_MEMORY, "utilization_memory_percent", GAUGE)                                                         \
    X(MEMORY_TOTAL, "memory_total_bytes", GAUGE)                                                                       \
    X(MEMORY_RESERVED, "memory_reserved_bytes", GAUGE)                                                                 \
    X(MEMORY_USED, "memory_used_bytes", GAUGE)                                                                         \
    X(POWER, "power_milliwatts", GAUGE)                                                                                \
    X(POWER_INSTANT, "power_instant_milliwatts", GAUGE) /* power_milliwatts where it is not given */                   \
    X(POWER_LIMIT, "power_limit_milliwatts", GAUGE)                                                                    \
    X(ENERGY, "energy_millijoules", COUNTER)                                                                           \
    X(SM_CLOCK, "sm_clock_megahertz", GAUGE)                                                                           \
    X(SM_CLOCK_MAX, "sm_clock_max_megahertz", GAUGE)                                                                   \
    X(MEMORY_CLOCK, "memory_clock_megahertz", GAUGE)                                                                   \
    X(MEMORY_CLOCK_MAX, "memory_clock_max_megahertz", GAUGE)                                                           \
    X(TEMPERATURE, "temperature_celsius", GAUGE)                                                                       \
    X(MEMORY_TEMPERATURE, "memory_temperature_celsius", GAUGE)                                                         \
    X(EVENT_REASONS, "event_reasons_bits", GAUGE)                                                                      \
    X(POWER_CAP_TIME, "power_cap_nanoseconds", COUNTER) /* field 74 */                                                 \
    X(THERMAL_TIME, "thermal_nanoseconds", COUNTER)     /* field 75 */                                                 \
    X(SW_THERMAL_TIME, "sw_thermal_nanoseconds", COUNTER)                                                              \
    X(HW_THERMAL_TIME, "hw_thermal_nanoseconds", COUNTER)                                                              \
    X(HW_POWER_BRAKE_TIME, "hw_power_brake_nanoseconds", COUNTER)                                                      \
    X(PCIE_TX, "pcie_transmit_bytes", COUNTER)                                                                         \
    X(PCIE_RX, "pcie_receive_bytes", COUNTER)                                                                          \
    X(PCIE_REPLAYS, "pcie_replays", STEPS)                                                                             \
    X(PCIE_GENERATION, "pcie_generation", GAUGE)                                                                       \
    X(PCIE_GENERATION_MAX, "pcie_generation_max", GAUGE)                                                               \
    X(PCIE_WIDTH, "pcie_width", GAUGE)                                                                                 \
    X(PCIE_WIDTH_MAX, "pcie_width_max", GAUGE)                                                                         \
    X(NVLINK_TX, "nvlink_transmit_kibibytes", COUNTER)                                                                 \
    X(NVLINK_RX, "nvlink_receive_kibibytes", COUNTER)                                                                  \
    X(NVLINK_CRC, "nvlink_crc_errors", STEPS) /* sums over the links, as are the next two */                           \
    X(NVLINK_REPLAYS, "nvlink_replay_errors", STEPS)                                                                   \
    X(NVLINK_RECOVERIES, "nvlink_recovery_errors", STEPS)                                                              \
    X(NVLINK_INTEGRITY, "nvlink_integrity_errors", STEPS) /* these three from version 5 of NVLink on */                  \
    X(NVLINK_FAILED_RECOVERIES, "nvlink_failed_recoveries", STEPS)                                                     \
    X(NVLINK_EFFECTIVE, "nvlink_effective_errors", STEPS)                                                              \
    X(NVLINK_INACTIVE, "nvlink_inactive_links", GAUGE) /* so many of the last links are down */                        \
    X(ECC_CORRECTED_VOLATILE, "ecc_corrected_volatile", STEPS)                                                         \
    X(ECC_UNCORRECTED_VOLATILE, "ecc_uncorrected_volatile", STEPS)                                                     \
    X(ECC_CORRECTED_AGGREGATE, "ecc_corrected_aggregate", GAUGE)                                                       \
    X(ECC_UNCORRECTED_AGGREGATE, "ecc_uncorrected_aggregate", GAUGE)                                                   \
    X(REMAPPED_CORRECTABLE, "remapped_rows_correctable", GAUGE)                                                        \
    X(REMAPPED_UNCORRECTABLE, "remapped_rows_uncorrectable", GAUGE)                                                    \
    X(REMAP_PENDING, "row_remap_pending", GAUGE)                                                                       \
    X(REMAP_FAILURE, "row_remap_failure", GAUGE)                                                                       \
    X(RECOVERY_ACTION, "recovery_action", GAUGE)                                                                       \
    X(FABRIC_STATE, "fabric_state", GAUGE) /* 0 not supported, 1 not started, 2 in progress, 3 completed */            \
    X(FABRIC_HEALTH, "fabric_health_mask", GAUGE)                                                                      \
    X(GPM_SM_ACTIVE, "gpm_sm_active_percent", GAUGE)                                                                   \
    X(GPM_SM_OCCUPANCY, "gpm_sm_occupancy_percent", GAUGE)                                                             \
    X(GPM_ANY_TENSOR, "gpm_any_tensor_percent", GAUGE)                                                                 \
    X(GPM_DFMA_TENSOR, "gpm_dfma_tensor_percent", GAUGE)                                                               \
    X(GPM_HMMA_TENSOR, "gpm_hmma_tensor_percent", GAUGE)                                                               \
    X(GPM_IMMA_TENSOR, "gpm_imma_tensor_percent", GAUGE)                                                               \
    X(GPM_DRAM, "gpm_dram_bandwidth_percent", GAUGE)                                                                   \
    X(GPM_FP64, "gpm_fp64_percent", GAUGE)                                                                             \
    X(GPM_FP32, "gpm_fp32_percent", GAUGE)                                                                             \
    X(GPM_FP16, "gpm_fp16_percent", GAUGE)                                                                             \
    X(GPM_PCIE_TX, "gpm_pcie_transmit_mibibytes_per_second", GAUGE)                                                    \
    X(GPM_PCIE_RX, "gpm_pcie_receive_mibibytes_per_second", GAUGE)                                                     \
    X(GPM_NVLINK_TX, "gpm_nvlink_transmit_mibibytes_per_second", GAUGE)                                                \
    X(GPM_NVLINK_RX, "gpm_nvlink_receive_mibibytes_per_second", GAUGE)                                                 \
    X(PROCESS_USE_AGE, "process_utilization_age_seconds", GAUGE) /* of the samples of process utilisation */            \
    X(STATUS, "status_code", GAUGE) /* return code of every call on this GPU: 0, 15 lost, 16 reset required */         \
    X(HANG, "hang", GAUGE)          /* calls on this GPU block while this is not 0 */

/* Other spellings that a script may use. */
#define VALUE_ALIASES(X) X(POWER_CAP_TIME, "sw_power_cap_nanoseconds")

#define VALUE_ENUM(id, name, kind) VALUE_##id,
enum value_id { VALUES(VALUE_ENUM) VALUE_COUNT };
#undef VALUE_ENUM

#define FIRST_GPM_VALUE VALUE_GPM_SM_ACTIVE
#define LAST_GPM_VALUE VALUE_GPM_NVLINK_RX

#endif
