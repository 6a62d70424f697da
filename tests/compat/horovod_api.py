# ruff: noqa: E501  (one line for each name)
"""Horovod's surface for torch, tensorflow, keras, common, data, runner, ray and spark, and its environment variables, as tables for the tests of this folder.

API: a line that ends with a colon opens a place, by every path that leads there (`torch` is bagua_hvd.torch). `@state`
and the like are objects; test_signatures.py makes them. Then one line for each name: the tier (A: nearly every script,
B: common, C: rare), and the signature as Horovod has it, or the name alone where there is nothing to compare. Defaults
that are objects are written as their names.
"""

API = """
.:
B __version__
B run(func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None, slots=None, reset_limit=None, cooldown_range=None, hosts=None, hostfile=None, host_discovery_script=None, start_timeout=None, ssh_port=None, ssh_identity_file=None, disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None, mpi_args=None, network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None, max_np=None)

torch tensorflow common.basics:
A init(comm=None, process_sets=None)
A shutdown()
A rank()
A size()
A local_rank()
A local_size()
B cross_rank()
B cross_size()
B is_initialized()
B start_timeline(file_path, mark_cycles=False)
B stop_timeline()
C mpi_threads_supported()
C mpi_enabled()
B mpi_built()
C gloo_enabled()
B gloo_built()
B nccl_built()
C ddl_built()
C ccl_built()
B cuda_built()
C rocm_built()
A Average
A Sum
B Adasum
B Min
B Max
B Product

torch.mpi_ops tensorflow common.basics:
C is_homogeneous()

torch.mpi_ops tensorflow.mpi_ops tensorflow.keras keras:
C _basics

torch.mpi_ops:
C init
C shutdown
C rank
C size
C handle_average_backwards_compatibility(op, average)
C HorovodAllreduce
C HorovodGroupedAllreduce
C HorovodAllgather
C HorovodGroupedAllgather
C HorovodBroadcast
C HorovodAlltoall
C HorovodReducescatter
C HorovodGroupedReducescatter

torch torch.mpi_ops:
A allreduce(tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
B allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
B allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
B allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
B grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
B grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
B grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
B grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
C sparse_allreduce_async(tensor, name, op, process_set=global_process_set)
A allgather(tensor, name=None, process_set=global_process_set)
B allgather_async(tensor, name=None, process_set=global_process_set)
C grouped_allgather(tensors, name=None, process_set=global_process_set)
C grouped_allgather_async(tensors, name=None, process_set=global_process_set)
A broadcast(tensor, root_rank, name=None, process_set=global_process_set)
A broadcast_(tensor, root_rank, name=None, process_set=global_process_set)
B broadcast_async(tensor, root_rank, name=None, process_set=global_process_set)
B broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set)
B alltoall(tensor, splits=None, name=None, process_set=global_process_set)
C alltoall_async(tensor, splits=None, name=None, process_set=global_process_set)
C reducescatter(tensor, name=None, compression=Compression.none, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
C reducescatter_async(tensor, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
C grouped_reducescatter(tensors, name=None, compression=Compression.none, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
C grouped_reducescatter_async(tensors, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
B join(device=-1)
B barrier(process_set=global_process_set)
A synchronize(handle)
B poll(handle)

torch:
C _check_has_gpu()
A HorovodInternalError
B elastic

torch torch.functions:
A broadcast_parameters(params, root_rank)
A broadcast_optimizer_state(optimizer, root_rank, model=None)
B broadcast_object(obj, root_rank=0, name=None, process_set=global_process_set)
B allgather_object(obj, name=None)

torch torch.optimizer:
A DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global_process_set)

@optimizer:
A step(closure=None)
A zero_grad()
B synchronize()
B skip_synchronize()
C set_backward_passes_per_step(passes)
B load_state_dict(*args, **kwargs)
C backward_passes_per_step
C op
C gradient_predivide_factor
C sparse_as_dense
C process_set

torch torch.compression:
A Compression

torch.compression:
C Compressor
C NoneCompressor
C FP16Compressor

@compression:
A none
B fp16

@compressor:
A compress(tensor)
A decompress(tensor, ctx)

torch torch.sync_batch_norm:
C SyncBatchNorm(num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)

torch tensorflow common.process_sets:
B global_process_set
B ProcessSet(ranks_or_comm)
B add_process_set(process_set)
B remove_process_set(process_set)

@process_set:
B size()
B rank()
B included()
C process_set_id
C ranks
C mpi_comm

torch.elastic:
B run(func)
B TorchState(model=None, optimizer=None, **kwargs)
B ElasticSampler(dataset, shuffle=True, seed=0)

torch.elastic.state:
C StateHandler
C ModelStateHandler
C OptimizerStateHandler
C SamplerStateHandler
C get_handler_registry()
C set_handler_registry

@state:
B commit()
B restore()
B sync()
B save()
B check_host_updates()
B register_reset_callbacks
B on_reset()
B on_hosts_updated
B reset()

@sampler:
B set_epoch(epoch)
B record_batch(batch_idx, batch_size)
C state_dict()
C load_state_dict
C reset()
C epoch
C processed_num
C num_replicas
C rank

tensorflow:
A allreduce(tensor, average=None, device_dense='', device_sparse='', compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=global_process_set, ignore_name_scope=False)
B grouped_allreduce(tensors, average=None, device_dense='', device_sparse='', compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set, ignore_name_scope=False, name=None)
A allgather(tensor, name=None, ignore_name_scope=False, process_set=global_process_set)
C grouped_allgather(tensors, name=None, ignore_name_scope=False, process_set=global_process_set)
A broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=global_process_set)
B broadcast_(variables, root_rank, name=None, process_set=global_process_set)
B alltoall(tensor, splits=None, name=None, ignore_name_scope=False, process_set=global_process_set)
C reducescatter(tensor, device_dense='', compression=Compression.none, op=Average, name=None, process_set=global_process_set, ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0)
C grouped_reducescatter(tensors, device_dense='', compression=Compression.none, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
B join()
C size_op(process_set_id=0, name=None)
C rank_op(name=None)
C local_rank_op(name=None)
C local_size_op(name=None)
C process_set_included_op(process_set_id=0, name=None)
A broadcast_variables(variables, root_rank, process_set=global_process_set, inplace=False)
B broadcast_global_variables(root_rank)
B BroadcastGlobalVariablesHook(root_rank, device='')
B broadcast_object(obj, root_rank=0, session=None, name=None, process_set=global_process_set)
C broadcast_object_fn(root_rank=0, session=None, name=None, process_set=global_process_set)
B allgather_object(obj, session=None, name=None, process_set=global_process_set)
C SyncBatchNormalization(fused=False, **kwargs)
C check_num_rank_power_of_2
C handle_average_backwards_compatibility(op, average)
C vars_to_refs
C refs_to_vars
C _executing_eagerly()
C _make_subgraph(f)
C _cache(f)
A HorovodInternalError
B elastic

A DistributedOptimizer(optimizer, name=None, use_locking=False, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=global_process_set, scale_local_gradients=True)
A DistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=global_process_set, scale_local_gradients=True)
C PartialDistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=global_process_set, local_layers=None, scale_local_gradients=True)
C LocalGradientAggregationHelper
C LocalGradientAggregationHelperEager(backward_passes_per_step, allreduce_func, sparse_as_dense, average_aggregated_gradients, process_set=global_process_set, scale_local_gradients=True)

tensorflow.util:
C _executing_eagerly()
C _make_subgraph(f)
C _cache(f)
C vars_to_refs
C refs_to_vars

tensorflow tensorflow.compression:
A Compression

tensorflow.elastic:
B run(func)
B TensorFlowKerasState(model, optimizer=None, backend=None, **kwargs)
B TensorFlowState(variables=None, session=None, **kwargs)

tensorflow.data.compute_service:
C TfDataServiceConfig(dispatchers, workers_per_dispatcher, dispatcher_side, addresses, key, timeout=60)
C tf_data_service(compute_config, rank)
C send_to_data_service(dataset, compute_config, rank, size=None, processing_mode='distributed_epoch', reuse_dataset=False, round_robin=False)
C compute_worker_fn(compute_config)

tensorflow.data.compute_worker:
C main(dispatchers, dispatcher_side, configfile, timeout)

@tensorflow_compression:
A none
A fp16

tensorflow.keras keras:
A init
A shutdown
A is_initialized
B start_timeline
B stop_timeline
A size
A local_size
B cross_size
A rank
A local_rank
B cross_rank
C mpi_threads_supported
C mpi_enabled
B mpi_built
C gloo_enabled
B gloo_built
B nccl_built
C ddl_built
C ccl_built
B cuda_built
C rocm_built
A Average
A Sum
A Compression
A callbacks
A elastic
A global_process_set
B broadcast_global_variables(root_rank)
B allgather(value, name=None)
B broadcast(value, root_rank, name=None)
C reducescatter(value, name=None, op=Average)
B load_model(filepath, custom_optimizers=None, custom_objects=None, compression=Compression.none, legacy_opts=False)

tensorflow.keras.callbacks keras.callbacks:
A BroadcastGlobalVariablesCallback(root_rank, device='', local_variables=None)
A MetricAverageCallback(device='')
B LearningRateScheduleCallback(initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, steps_per_epoch=None)
B LearningRateWarmupCallback(initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0)

tensorflow.keras.elastic keras.elastic:
B KerasState(model, optimizer=None, **kwargs)
B CommitStateCallback(state, batches_per_commit=1)
B UpdateBatchStateCallback(state)
B UpdateEpochStateCallback(state)
B run(func)

tensorflow.keras:
B ProcessSet
B add_process_set(process_set)
B remove_process_set(process_set)
A DistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=global_process_set, scale_local_gradients=True)
B allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=Compression.none)

tensorflow.keras.callbacks:
C BestModelCheckpoint(monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', save_freq='epoch')

keras:
B Adasum
A DistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, num_groups=0, groups=None)
C PartialDistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, groups=None, process_set=global_process_set, local_layers=None, scale_local_gradients=True)
B allreduce(value, name=None, average=True, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=Compression.none)

keras.callbacks:
C BestModelCheckpoint(monitor='val_loss', verbose=0, mode='auto', save_freq='epoch')

common.exceptions:
A HorovodInternalError
B HostsUpdatedInterrupt(skip_sync)
C HorovodVersionMismatchError(name, version, installed_version)
C get_version_mismatch_message(name, version, installed_version)

common.util:
C extension_available(ext_base_name, verbose=False)
C gpu_available(ext_base_name, verbose=False)
B mpi_built(verbose=False)
B gloo_built(verbose=False)
C nccl_built(verbose=False)
C ddl_built(verbose=False)
C ccl_built(verbose=False)
C check_extension(ext_name, ext_env_var, pkg_path, *args)
C check_installed_version(name, version, exception=None)
C env(**kwargs)
C get_average_backwards_compatibility_fun(reduce_ops)
C num_rank_is_power_2(num_rank)
C split_list(l, n)
C is_iterable(x)
C is_version_greater_equal_than(ver, target)
C _cache(f)
C get_ext_suffix()
C get_extension_full_path(pkg_path, *args)

common.elastic:
B State(bcast_object, get_rank)
B ObjectState(bcast_object, get_rank, **kwargs)
C run_fn(func, reset)
C notification_manager

data:
B BaseDataLoader
B AsyncDataLoaderMixin(async_loader_queue_size=64, debug_data_loader=False, *args, **kwargs)

@loader:
B _iterate()
B _process_batch(batch)
B __len__()
B __iter__()
B close_async_loader()
C async_loader_queue_size
C debug_data_loader
C queue
C finished_event
C started

runner:
C _HorovodArgs

runner.launch:
C parse_args()
C _run(args)
C _run_static(args)
C _run_elastic(args)
C run_commandline()
C run_controller(use_gloo, gloo_run, use_mpi, mpi_run, use_jsrun, js_run, verbosity)
C is_gloo_used
C check_build(verbose)

runner.common.util.env:
C get_env_rank_and_size()

runner.common.util.hosts:
C HostInfo
C SlotInfo
C INVALID_SLOT_INFO
C parse_hosts
C parse_hosts_and_slots
C parse_host_files
C get_host_assignments(hosts, min_num_proc, max_num_proc=None)

runner.common.util.config_parser:
C set_args_from_config(args, config, override_args)
C validate_config_args(args)
C set_env_from_args(env, args)
C LOG_LEVELS

runner.common.util.timeout:
C Timeout(timeout, message)
C TimeoutException

runner.common.util.secret:
C make_secret_key()

runner.common.util.codec:
C dumps_base64
C loads_base64

runner.common.util.safe_shell_exec:
C execute(command, env=None, stdout=None, stderr=None, index=None, events=None, prefix_output_with_timestamp=False)

runner.common.util.host_hash:
C host_hash(salt=None)

runner.elastic.discovery:
C HostDiscovery
C HostDiscoveryScript
C FixedHosts
C HostManager(discovery, cooldown_range=None)

runner.elastic.driver:
C ElasticDriver

runner.elastic.worker:
C HostUpdateResult

runner.elastic.settings:
C ElasticSettings

runner.elastic.registration:
C WorkerStateRegistry

ray:
B RayExecutor(settings, num_workers=None, num_hosts=None, num_workers_per_host=1, cpus_per_worker=1, use_gpu=False, gpus_per_worker=None, use_current_placement_group=True, min_workers=None, max_workers=None, reset_limit=None, cooldown_range=None, elastic_timeout=600, override_discovery=True)
C ElasticRayExecutor(settings, use_gpu=False, cpus_per_slot=1, gpus_per_slot=None, env_vars=None, override_discovery=True)
C BaseHorovodWorker(world_rank=0, world_size=1)
C RayHostDiscovery(use_gpu=False, cpus_per_slot=1, gpus_per_slot=1)

@ray_executor:
B create_settings(timeout_s=30, ssh_identity_file=None, ssh_str=None, placement_group_timeout_s=100, nics=None)
B start(executable_cls=None, executable_args=None, executable_kwargs=None, extra_env_vars=None)
B run(fn, args=None, kwargs=None, callbacks=None)
B run_remote(fn, args=None, kwargs=None)
B execute(fn, callbacks=None)
B execute_single(fn)
B shutdown()

@elastic_ray_executor:
C create_settings(min_num_proc=1, max_num_proc=None, reset_limit=None, elastic_timeout=600, timeout_s=30, ssh_identity_file=None, nics=None, min_np=None, max_np=None, **kwargs)
C start()
C run(worker_fn, callbacks=None)

@ray_worker:
C node_id()
C hostname()
C get_gpu_ids()
C update_env_vars
C env_vars()
C start_executable
C execute
C set_queue

ray.ray_logger:
C configure(queue)
C log(info_dict)

ray.runner:
C Coordinator
C MiniSettings

ray.utils:
C detect_nics
C nics_to_env_var

spark:
B run(fn, args=(), kwargs={}, num_proc=None, start_timeout=None, use_mpi=None, use_gloo=None, extra_mpi_args=None, env=None, stdout=None, stderr=None, verbose=1, nics=None, prefix_output_with_timestamp=False, executable=None)
C run_elastic

spark.common.backend:
C Backend
C SparkBackend(num_proc=None, env=None, **kwargs)

spark.common.store:
B Store
B FilesystemStore
B LocalStore
B HDFSStore
B DBFSLocalStore

@store:
B create(prefix_path, *args, **kwargs)

spark.torch spark.lightning:
C TorchEstimator
C TorchModel

spark.keras:
C KerasEstimator
C KerasModel
"""

# Read when Horovod runs, or set by its launcher.
VARIABLES = """
HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME
HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_CONTROLLER HOROVOD_CPU_OPERATIONS HOROVOD_GLOO_IFACE
HOROVOD_GLOO_TIMEOUT_SECONDS HOROVOD_ELASTIC _HOROVOD_SECRET_KEY HOROVOD_START_TIMEOUT HOROVOD_ELASTIC_TIMEOUT
HOROVOD_SPARK_START_TIMEOUT HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX HOROVOD_SPARK_PYTHONPATH HOROVOD_SPARK_WORK_DIR
HOROVOD_FUSION_THRESHOLD HOROVOD_CYCLE_TIME HOROVOD_CACHE_CAPACITY HOROVOD_HIERARCHICAL_ALLREDUCE
HOROVOD_HIERARCHICAL_ALLGATHER HOROVOD_TORUS_ALLREDUCE HOROVOD_BATCH_D2D_MEMCOPIES HOROVOD_DISABLE_GROUP_FUSION
HOROVOD_ENABLE_ASYNC_COMPLETION HOROVOD_ENABLE_XLA_OPS HOROVOD_ADASUM_MPI_CHUNK_SIZE HOROVOD_NUM_NCCL_STREAMS
HOROVOD_MPI_THREADS_DISABLE HOROVOD_THREAD_AFFINITY HOROVOD_CCL_CACHE HOROVOD_DYNAMIC_PROCESS_SETS HOROVOD_TIMELINE
HOROVOD_TIMELINE_MARK_CYCLES HOROVOD_AUTOTUNE HOROVOD_AUTOTUNE_LOG HOROVOD_AUTOTUNE_WARMUP_SAMPLES
HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE
HOROVOD_STALL_CHECK_DISABLE HOROVOD_STALL_CHECK_TIME_SECONDS HOROVOD_STALL_SHUTDOWN_TIME_SECONDS HOROVOD_LOG_LEVEL
HOROVOD_LOG_HIDE_TIME HOROVOD_DISABLE_NVTX_RANGES HOROVOD_TEST_GPU
OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE NCCL_SOCKET_IFNAME NCCL_IB_DISABLE PYTHONUNBUFFERED
""".split()

# Read when Horovod is built. HOROVOD_CPU_OPERATIONS is of both kinds; HOROVOD_WITHOUT_* is a family.
BUILD_VARIABLES = """
HOROVOD_WITH_TENSORFLOW HOROVOD_WITH_PYTORCH HOROVOD_WITH_MXNET HOROVOD_WITH_GLOO HOROVOD_WITH_MPI HOROVOD_WITHOUT_*
HOROVOD_GPU HOROVOD_GPU_OPERATIONS HOROVOD_GPU_ALLREDUCE HOROVOD_GPU_ALLGATHER HOROVOD_GPU_BROADCAST
HOROVOD_GPU_ALLTOALL HOROVOD_GPU_REDUCESCATTER HOROVOD_ALLOW_MIXED_GPU_IMPL HOROVOD_CUDA_HOME HOROVOD_BUILD_CUDA_CC_LIST
HOROVOD_ROCM_HOME HOROVOD_NCCL_HOME HOROVOD_NCCL_INCLUDE HOROVOD_NCCL_LIB HOROVOD_NCCL_LINK HOROVOD_CMAKE HOROVOD_DEBUG
HOROVOD_BUILD_ARCH_FLAGS
""".split()


def rows():
    """API as (tier, place, signature or name), one row for every path."""
    places = []
    for line in API.strip().splitlines():
        if line.endswith(":"):
            places = line[:-1].split()
        elif line:
            tier, signature = line.split(" ", 1)
            for place in places:
                yield tier, place, signature
